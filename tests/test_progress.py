"""Progress along the shortest line, which training rewards: what it pays, and what it leaves as it is."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import assert_same, make_config

from racer.game.limit import shortest_line
from racer.game.progress import LineProgress
from racer.game.rules import DT_S, MAX_SPEED
from racer.game.tracks import load_track
from racer.training.references import full_throttle, limit_lap
from racer_env import RacerVectorEnv


SLOW_TRACK_02 = pytest.param("track-02", marks=pytest.mark.slow)


def along_the_limit(track: str) -> tuple[np.ndarray, LineProgress]:
    """A lap on the shortest line, tick by tick, as (s, x, y)."""
    x, y = limit_lap(track).columns["x"], limit_lap(track).columns["y"]
    arc, _ = load_track(track).project(np.column_stack([x, y]))
    return np.stack([arc, x, y]), LineProgress([track], 1.0)


@pytest.mark.parametrize("track", ["track-01", SLOW_TRACK_02, "track-03", "random-4"])
def test_on_the_line_every_tick_pays_its_way_and_a_lap_pays_one(track):
    places, line = along_the_limit(track)
    line.on_reset([0], *places[:, :1])
    gains = np.array([line.gain(*places[:, i : i + 1])[0] for i in range(1, places.shape[1])])
    assert gains.sum() == pytest.approx(1.0, abs=1e-9)
    even = MAX_SPEED * DT_S / shortest_line(load_track(track))[1]
    np.testing.assert_allclose(gains, even, rtol=0.03)
    arc = np.unwrap(places[0], period=load_track(track).length) / load_track(track).length
    assert np.ptp(np.diff(arc)) > 0.15 * even, "progress along the centreline is paid unevenly"


@pytest.mark.parametrize("track", ["track-01", "track-02", pytest.param("track-03", marks=pytest.mark.slow)])
def test_beside_the_line_it_is_the_way_along_the_line_that_counts(track):
    places, line = along_the_limit(track)
    shape, (s, x, y) = load_track(track), places[:, 100:101]
    laps, tangent = line.at(s, x, y), np.gradient(places[1:], axis=1)[:, 100]
    tangent = tangent / np.hypot(*tangent)
    for step, expected in ((tangent, 1.0), (np.array([-tangent[1], tangent[0]]), 0.0)):
        moved = places[1:, 100] + 0.5 * step
        arc, _ = shape.project(moved[None])
        gained = (line.at(arc, moved[:1], moved[1:]) - laps) * shortest_line(shape)[1] / 0.5
        np.testing.assert_allclose(gained, expected, atol=0.06)


def steps(envs, count: int = 120) -> tuple[np.ndarray, list[dict]]:
    obs, _ = envs.reset(seed=3)
    rewards, infos = [], []
    for _ in range(count):
        obs, reward, *_, info = envs.step(full_throttle(obs, 0.4, 0.03))
        rewards.append(reward)
        infos.append(info)
    envs.close()
    return np.array(rewards), infos


@pytest.mark.parametrize("action_repeat", [1, 3])
def test_only_what_is_learned_from_changes(action_repeat):
    config = make_config(maxSteps=90)
    both = [
        steps(RacerVectorEnv(4, ["track-01", "track-03"], config, action_repeat=action_repeat, progress=progress))
        for progress in ("centreline", "line")
    ]
    (rewards, infos), (learned, own) = both
    assert not np.allclose(rewards, learned, atol=1e-5)
    for a, b in zip(infos, own, strict=True):
        for info in (a, b):
            info.pop("final_obs", None)
            info.get("episode", {}).pop("t", None)
        assert_same(a, b)
    ends = [info["episode"]["r"] for info in infos if "episode" in info]
    assert ends and ends[0][0] == pytest.approx(rewards[: 90 // action_repeat, 0].sum())


def test_a_config_s_weight_of_progress_counts_and_a_teleport_does_not():
    config = make_config(progress=5.0, maxSteps=100)
    plain, _ = steps(RacerVectorEnv(2, "track-01", make_config(maxSteps=100), progress="line"))
    heavy, infos = steps(RacerVectorEnv(2, "track-01", config, progress="line"))
    assert any("episode" in info for info in infos) and np.abs(heavy).max() < 5 * 0.004
    others = sum(infos[50][part] for part in ("wall", "offTrack", "stillness"))
    np.testing.assert_allclose(heavy[50] - others, 5 * (plain[50] - others))


def test_a_state_that_is_set_continues_with_the_same_rewards():
    a, b = (RacerVectorEnv(3, "track-02", start="anywhere", progress="line") for _ in range(2))
    for envs in (a, b):
        envs.reset(seed=9)
    for _ in range(50):
        a.step(np.tile([0.1, 1.0, 0.0], (3, 1)))
    b.set_state(a.get_state())
    actions = np.tile([0.1, 1.0, 0.0], (3, 1))
    for _ in range(5):
        np.testing.assert_array_equal(a.step(actions)[1], b.step(actions)[1])


def test_on_a_bridge_the_rays_say_on_which_side_a_car_is(good_bridge):
    embedded, _ = steps(RacerVectorEnv(2, ["track-01", "track-03"], progress="line"), 400)
    bridged, _ = steps(RacerVectorEnv(2, ["track-01", "track-03"], bridge_url=good_bridge.url, progress="line"), 400)
    centreline, _ = steps(RacerVectorEnv(2, ["track-01", "track-03"]), 400)
    for car in (0, 1):
        wrong, unlike = (np.abs(rewards[:, car] - embedded[:, car]).mean() for rewards in (bridged, centreline))
        assert wrong < 0.1 * unlike


def test_another_progress_is_refused():
    with pytest.raises(ValueError, match=r"unknown progress 'arc'\. Available: centreline, line"):
        RacerVectorEnv(2, progress="arc")
