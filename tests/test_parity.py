"""The embedded engine against recorded episodes of the real game, replayed open loop to the last tick (tests/golden)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import drive, hold_random_inputs
from slow_engine import SlowCar, SlowTrack

from racer.game.rules import DEFAULT_CONFIG, REWARD_PARTS
from racer.game.sim import ARC_TOLERANCE, RacerSim
from racer.game.track import Track
from racer.game.tracks import TRACKS

TRACES = sorted((Path(__file__).parent / "golden").glob("track-*-*.npz"))
assert len(TRACES) == 15
EXACT_STATE = {"lap": "lap", "checkpoint": "checkpoint", "stepCount": "step_count", "wallContact": "wall_contact",
               "stillnessCounter": "stillness"}  # fmt: skip
RAYS, SPEED, YAW, STEER, ARC, CENTRE = slice(0, 9), 9, 10, 11, 12, 13


def replay(sim: RacerSim, actions: np.ndarray) -> dict[str, np.ndarray]:
    """(T, 3) actions for car 0 -> everything there is, (T, ...)"""
    record = {key: [] for key in ("rewards", "terminated", "truncated", "rawSpeed", *REWARD_PARTS, *EXACT_STATE)}
    observations = [sim.observe()[0]]
    for action in actions:
        step, rewards, terminated, truncated = sim.step(np.tile(action, (sim.num_cars, 1)))
        observations.append(step[0])
        ends = {"terminated": terminated, "truncated": truncated}
        values = {"rewards": rewards, **ends, "rawSpeed": sim.speed, **sim.parts}
        values |= {key: getattr(sim, name) for key, name in EXACT_STATE.items()}
        for key, value in values.items():
            record[key].append(value[0])
    return {"observations": np.array(observations), **{key: np.array(value) for key, value in record.items()}}


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_replay_of_a_recorded_episode(path):
    trace = np.load(path)
    config = json.loads(str(trace["config"]))
    mine = replay(RacerSim(1, [str(trace["track"])], config), trace["actions"])
    error = np.abs(mine["observations"] - trace["observations"])
    error[:, ARC] = np.minimum(error[:, ARC], 1 - error[:, ARC])
    for part in (RAYS, SPEED, YAW, STEER):
        assert error[:, part].max() <= 1e-9
    assert error[:, ARC].max() <= ARC_TOLERANCE
    assert error[:, CENTRE].max() <= 2e-5
    assert np.abs(mine["rawSpeed"] - trace["info_rawSpeed"]).max() <= 1e-7
    progress_weight = max(1.0, abs(config["weights"]["progress"]))
    assert np.abs(mine["progress"] - trace["info_progress"]).max() <= ARC_TOLERANCE * progress_weight
    assert np.abs(mine["speed"] - trace["info_speed"]).max() <= 1e-9
    for key in ("wall", "offTrack", "backward", "stillness", *EXACT_STATE):
        np.testing.assert_array_equal(mine[key], trace[f"info_{key}"], err_msg=key)
    for key in ("terminated", "truncated"):
        np.testing.assert_array_equal(mine[key], trace[key], err_msg=key)
    assert abs(mine["rewards"].sum() - trace["rewards"].sum()) <= 1e-3


def test_all_traces_at_once_in_one_batch_over_three_tracks():
    """Every car replays its own episode beside the others, on its own track: the same numbers as alone, bit for bit."""
    # Those with the default config.
    traces = [np.load(path) for path in TRACES if "weights" not in path.stem and "uturn" not in path.stem]
    alone = [replay(RacerSim(1, [str(trace["track"])]), trace["actions"][:180]) for trace in traces]
    batch = RacerSim(len(traces), [str(trace["track"]) for trace in traces])
    for t in range(180):
        observations, rewards, *_ = batch.step(np.array([trace["actions"][t] for trace in traces]))
        for i, expected in enumerate(alone):
            np.testing.assert_array_equal(observations[i], expected["observations"][t + 1])
            assert rewards[i] == expected["rewards"][t]


def test_the_traces_would_catch_a_wrong_constant(monkeypatch):
    """The tolerance is tight enough: the smallest plausible slips do not pass."""
    trace = np.load(TRACES[0].with_name("track-01-hold.npz"))
    wrong = {"STEER_FADE": 0.0251, "SLIDE_KEEP": 0.701, "DRAG": 2.001, "PUSH_SLIDE": 0.81, "BOUNCE": 0.081}
    for name, value in wrong.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"racer.game.sim.{name}", value)
            mine = replay(RacerSim(1), trace["actions"][:400])
        assert np.abs(mine["observations"][:, :12] - trace["observations"][:401, :12]).max() > 1e-7, name


UNSEEN = {
    "clockwise": [tuple(p) for p in np.array(TRACKS["track-01"])[::-1].tolist()],
    "kinks": [(1.5 * x, 1.5 * y, width) for x, y, width in (
        (0, 0, 14), (150, 0, 22), (220, 70, 10), (120, 130, 16), (180, 240, 25), (20, 300, 12), (-130, 200, 20),
        (-90, 90, 9),
    )],
}  # fmt: skip


WHOLE = [(name, driver, 350) for name in UNSEEN for driver in ("drive", "hold")]
LONG = [pytest.param(name, f"both-{seed}", 3000, marks=pytest.mark.slow) for name in TRACKS for seed in (0, 1)]


@pytest.mark.parametrize(("name", "driver", "ticks"), [*WHOLE, *LONG])
def test_episodes_match_the_engine_written_twice(name, driver, ticks):
    """On tracks the game never had; and long ones, driven well and at random in turn: no drift, no rare branch missed."""
    points = UNSEEN.get(name) or TRACKS[name]
    sim, car = RacerSim(1), SlowCar(SlowTrack(points), DEFAULT_CONFIG)
    sim.world = type(sim.world)([Track(name, points)])
    observations = sim.reset()
    np.testing.assert_allclose(observations[0], car.observe(), atol=1e-6)
    plan, total = hold_random_inputs(np.random.default_rng(7 + driver.endswith("1")), ticks), 0.0
    for tick in range(ticks):
        well = driver == "drive" or (driver != "hold" and tick // 300 % 2 == 0)
        action = drive(observations)[0] if well else plan[tick]
        observations, rewards, terminated, truncated = sim.step(action[None])
        expected, reward, their_end, their_cut, info = car.step(action)
        np.testing.assert_allclose(observations[0, :12], expected[:12], atol=1e-9)
        gap = abs(observations[0, 12] - expected[12])
        assert min(gap, 1 - gap) <= ARC_TOLERANCE and abs(observations[0, 13] - expected[13]) <= 2e-5
        for key, attribute in EXACT_STATE.items():
            assert getattr(sim, attribute)[0] == info[key], key
        for part in ("wall", "offTrack", "stillness"):
            assert sim.parts[part][0] == info[part], part
        assert (terminated[0], truncated[0]) == (their_end, their_cut)
        total += rewards[0] - reward
    assert abs(total) <= 1e-3
