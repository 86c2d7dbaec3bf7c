"""The best laps known: recorded inputs that drive them, what evaluation makes of them, and drivers that come near."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import args_of

import ppo_racer
from callbacks_lite import BEST_LAP_TICKS, Episode, best_lap_ticks, describe, eval_metrics, evaluate_driver, summarize
from racer_env import DEFAULT_CONFIG_PATH, RacerVectorEnv, load_config
from racer_sim import TRACKS, RacerSim

ROOT = Path(__file__).resolve().parent.parent
FASTEST = ROOT / "ai-config-fastest.json"
HELD_OUT = [str(ROOT / "tests" / "tracks" / f"{name}.json") for name in ("esses", "hairpin")]
LAPS = [(kind, track) for kind in ("road", "any") for track in TRACKS]


@pytest.mark.parametrize(("kind", "track"), LAPS)
def test_recorded_inputs_drive_the_best_lap_known(kind, track):
    """From the grid to the end of the lap, on the engine as it is. On the road, if that is the kind."""
    actions = np.load(ROOT / "tests" / "golden" / "best-laps" / f"{kind}-{track}.npz")["actions"]
    sim, crossings, left_road = RacerSim(1, [track]), [0], [0]
    for tick, action in enumerate(actions.astype(np.float64), start=1):
        lap = sim.lap[0]
        sim.step(action[None])
        if sim.parts["offTrack"][0] < 0 or sim.parts["wall"][0] < 0:
            left_road.append(tick)
        if sim.lap[0] > lap:
            crossings.append(tick)
    assert crossings[-1] == len(actions) and len(crossings) >= 3, "the last input ends a flying lap"
    assert crossings[-1] - crossings[-2] == BEST_LAP_TICKS[kind][track]
    if kind == "road":
        assert left_road[-1] <= crossings[-2]


def test_the_two_reward_files_differ_in_the_price_of_the_shoulder_alone():
    usual, fastest = load_config(DEFAULT_CONFIG_PATH), load_config(FASTEST)
    assert fastest["weights"].pop("offTrackPenalty") == 0 > usual["weights"].pop("offTrackPenalty")
    assert usual == fastest
    for track in TRACKS:
        assert best_lap_ticks(track, load_config()) == BEST_LAP_TICKS["road"][track]
        assert (
            best_lap_ticks(track, load_config(FASTEST)) == BEST_LAP_TICKS["any"][track] < BEST_LAP_TICKS["road"][track]
        )
    assert best_lap_ticks("mine.json", usual | {"weights": {"offTrackPenalty": -0.001}}) is None


def test_laps_are_shown_as_a_share_of_the_best_known():
    best = BEST_LAP_TICKS["road"]["track-01"]
    episode = Episode("track-01", lap_ticks=[500, 2 * best, 2 * best + 10, 2 * best - 10], best_known=best)
    assert summarize([episode])["percent_of_best"] == pytest.approx(50.0)
    assert "50.0 % of the best known" in describe(summarize([episode]))
    cutting = Episode("track-01", lap_ticks=[500, best - 5], best_known=best)  # not on the road, then
    share = 100 * BEST_LAP_TICKS["any"]["track-01"] / (best - 5)
    assert summarize([cutting])["percent_of_best"] == pytest.approx(share)
    whole = Episode("track-02", lap_ticks=[999, 900], best_known=900)
    unknown = Episode("mine", lap_ticks=[999, 900])
    assert eval_metrics([episode, whole, unknown])["eval/percent_of_best_lap"] == pytest.approx(75.0)
    assert "eval/percent_of_best_lap" not in eval_metrics([unknown])
    assert "best known" not in describe(summarize([unknown]))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_driver_laps_from_anywhere_on_every_track_and_on_two_it_has_never_seen(tmp_path, capsys):
    """The three-track default: 200 random starts a track, and no more than one in a hundred without its laps."""
    tracks = ("--track-id", *TRACKS)
    args = args_of("ppo", *tracks, total_timesteps=8_000_000, run_dir=tmp_path, run_name="run", tensorboard=False)
    ppo_racer.train(args)

    def drive_from(*words, **settings):
        args = args_of("ppo", "--evaluate", tmp_path / "run", *words, **settings)
        return evaluate_driver(args, "ppo", ppo_racer.make_agent)

    out = tmp_path / "out.json"
    results = drive_from(start="anywhere", episodes=200, json=out)
    assert json.loads(out.read_text()) == results
    results += drive_from("--track-id", *HELD_OUT, start="anywhere", episodes=200)
    assert [result["track"] for result in results] == [*TRACKS, *HELD_OUT]
    for result in results:
        assert result["failures"] <= 0.01 * result["episodes"], result
        assert result["completion_rate"] >= 0.99 and result["laps"] > result["episodes"], result
    assert "all tracks: 600 episodes, " in capsys.readouterr().out
    for result in drive_from(episodes=1):
        assert result["percent_of_best"] > 90, result


def test_held_out_tracks_are_tracks_that_can_be_driven():
    envs = RacerVectorEnv(2, HELD_OUT)
    observations, _ = envs.reset(seed=0)
    assert observations.shape == (2, 14) and not np.array_equal(*observations)
    assert set(TRACKS) & {Path(track).stem for track in HELD_OUT} == set()
