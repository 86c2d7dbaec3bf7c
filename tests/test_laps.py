"""Laps and episodes against hand-made infos and real ones; what an evaluation says of a driver."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from conftest import drive, short_episodes

from callbacks_lite import MetricsLogger, RaceStats
from racer.game.config import load_config
from racer.game.rules import REWARD_PARTS, TICKS_PER_SECOND
from racer.game.sim import RacerSim
from racer.game.tracks import load_track
from racer.training.evaluation import (
    describe_all, describe_more, drive_lap, eval_metrics, evaluate, score, summarize, with_flying_laps,
)  # fmt: skip
from racer.training.references import HAND_WRITTEN, best_hand_written, full_throttle, hand_written_settings
from racer_env import RacerVectorEnv

# -- laps and episodes -------------------------------------------------------------------------------------------------


def make_infos(laps, progress=0.001, ticks=1, lengths=None, returns=None, cut=False):
    """laps: ticks of the lap that each car completed, or 0. lengths: ticks of the episode that each car ended, or 0."""
    n = len(laps)
    infos = {"lapTicks": np.array(laps), "ticks": np.full(n, ticks)}
    infos |= {part: np.full(n, progress if part == "progress" else 0.0) for part in REWARD_PARTS}
    if lengths is not None:
        infos["_final_info"] = np.array(lengths) > 0
        infos["episode"] = {"r": np.array(returns), "l": np.array(lengths), "cut": np.zeros(n, bool) | cut}
    return infos


def logged(stats, tmp_path, *others):
    """What a rollout of these cars, and of those of other processes, writes."""
    logger = MetricsLogger(tmp_path, tensorboard=False)
    stats.log(logger, [each.take() for each in (stats, *others)])
    return logger.dump(0)


def test_laps_and_episodes_are_counted_also_in_the_same_step(tmp_path):
    stats = RaceStats(["track-01"] * 2, 3000)
    stats.step(make_infos([500, 0], lengths=[500, 0], returns=[3.0, 0.0]))
    stats.step(make_infos([310, 0]))
    values = logged(stats, tmp_path)
    assert values["racer/mean_lap_time_sec"] == pytest.approx((500 + 310) / 2 / TICKS_PER_SECOND)
    assert values["racer/completion_rate"] == 1.0 and values["racer/episodes_this_rollout"] == 1


def test_what_did_not_happen_is_not_logged_and_accumulators_clear(tmp_path):
    stats = RaceStats(["track-01"] * 1, 3000)
    stats.step(make_infos([0], progress=0.25))
    values = logged(stats, tmp_path)
    assert set(values) == {f"reward/{part}" for part in REWARD_PARTS}
    assert values["reward/progress"] == 0.25
    stats.step(make_infos([0], progress=0.75))
    assert logged(stats, tmp_path)["reward/progress"] == 0.75


def test_reward_parts_are_means_per_tick_whatever_a_step_holds(tmp_path):
    stats = RaceStats(["track-01"] * 2, 3000)
    stats.step(make_infos([0, 0], progress=4.0, ticks=4))
    assert logged(stats, tmp_path)["reward/progress"] == 1.0


def test_a_cut_episode_and_an_early_end_each_stand_for_themselves(tmp_path):
    stats = RaceStats(["track-01"] * 2, 3000)
    stats.step(make_infos([0, 0], lengths=[180, 100], returns=[-0.5, 0.2], cut=[False, True]))
    values = logged(stats, tmp_path)
    assert values["rollout/ep_rew_mean"] == pytest.approx((-0.5 + 0.002 * 3000) / 2)
    assert values["rollout/ep_len_mean"] == pytest.approx((180 + 3000) / 2)


@pytest.mark.parametrize(("ticks", "expected"), [(1000, None), (1600, 0.5)])
def test_cut_episodes_count_for_completion_by_their_length_not_by_their_luck(tmp_path, ticks, expected):
    stats = RaceStats(["track-01"] * 10, 3000)
    stats.step(make_infos([501] * 5 + [0] * 5))
    stats.step(make_infos([0] * 10, lengths=[ticks] * 10, returns=[1.0] * 10, cut=True))
    assert logged(stats, tmp_path).get("racer/completion_rate") == expected


def test_whole_episodes_give_the_plain_means_of_the_last_hundred(tmp_path):
    stats = RaceStats(["track-01"] * 1, 1000)
    for i in range(150):
        stats.step(make_infos([0], lengths=[10 + i], returns=[float(i)]))
    values = logged(stats, tmp_path)
    assert values["rollout/ep_rew_mean"] == pytest.approx(np.mean(range(50, 150)))
    assert values["rollout/ep_len_mean"] == pytest.approx(10 + np.mean(range(50, 150)))
    assert values["racer/completion_rate"] == 0.0


@pytest.mark.parametrize(("start", "repeat"), [("grid", 1), ("anywhere", 1), ("anywhere", 4)])
def test_real_laps_are_timed_as_the_engine_times_them(start, repeat, tmp_path):
    """Six cars on two tracks, short episodes: every lap the engine counts is timed, and nothing else is."""
    config = short_episodes(tmp_path, 1300)
    tracks = ["track-01", "track-02"]
    envs = RacerVectorEnv(6, tracks, config, start=start, stagger=True, action_repeat=repeat)
    stats = RaceStats(["track-01"] * 6, 1300)
    observations, _ = envs.reset(seed=3)
    sim, engine_laps = envs._sim, []
    counted = sim.cross_gates

    def cross_gates(*arguments):
        before = sim.lap
        counted(*arguments)
        engine_laps.extend((sim.lap_ticks[sim.lap > before] / TICKS_PER_SECOND).tolist())

    sim.cross_gates = cross_gates
    for _ in range(2800 // repeat):
        observations, *_, infos = envs.step(drive(observations))
        stats.step(infos)
    assert len(engine_laps) > 6
    rollout = stats.take()
    timed = [seconds for _, seconds in rollout["laps"]]
    assert timed == engine_laps if repeat == 1 else sorted(timed) == sorted(engine_laps)
    assert len(rollout["episodes"]) >= 12


def test_stats_state_continues(tmp_path):
    def feed(stats, steps):
        for t in steps:
            ends = {"lengths": [t, 0], "returns": [1.0, 0.0]} if t % 40 == 0 else {}
            stats.step(make_infos([0, 100 + t if t % 70 == 0 else 0], **ends))

    whole, first, second = (RaceStats(["track-01"] * 2, 3000) for _ in range(3))
    feed(whole, range(1, 150)), logged(whole, tmp_path), feed(whole, range(150, 260))
    feed(first, range(1, 150)), logged(first, tmp_path)
    second.set_state(first.get_state())
    assert second.best_lap_sec == first.best_lap_sec == 170 / TICKS_PER_SECOND
    feed(second, range(150, 260))
    assert logged(second, tmp_path) == logged(whole, tmp_path)


def test_what_happened_in_another_process_counts_as_ones_own(tmp_path):
    """Four cars in one process, or two each in two: the same is logged."""

    def feed(stats, cars):
        stats.step(make_infos([480 + 2 * c for c in cars], progress=0.5))
        stats.step(make_infos([0] * len(cars), lengths=[500] * len(cars), returns=list(map(float, cars))))

    whole, first, second = (RaceStats(["track-01"] * n, 3000) for n in (4, 2, 2))
    feed(whole, [0, 1, 2, 3]), feed(first, [0, 1]), feed(second, [2, 3])
    assert logged(first, tmp_path / "b", second) == pytest.approx(logged(whole, tmp_path / "a"))
    assert first.best_lap_sec == whole.best_lap_sec == 8.0
    assert not second.take()["episodes"], "told once"


def test_lap_times_of_several_tracks_are_not_mixed(tmp_path):
    stats = RaceStats(["track-01", "track-02"], 3000)
    stats.step(make_infos([500, 900]))
    values = logged(stats, tmp_path)
    for track, ticks in (("track-01", 500), ("track-02", 900)):
        assert values[f"racer/{track}/best_lap_time_sec"] == pytest.approx(ticks / TICKS_PER_SECOND)
        assert values[f"racer/{track}/mean_lap_time_sec"] == pytest.approx(ticks / TICKS_PER_SECOND)
    assert not any("lap_time" in tag for tag in values if tag.count("/") == 1)


def test_an_episode_of_no_ticks_is_none(tmp_path):
    """A bridge can fail before the first one."""
    stats = RaceStats(["track-01"] * 1, 3000)
    infos = make_infos([0], lengths=[0], returns=[0.0], cut=True)
    stats.step(infos | {"_final_info": np.array([True])})
    assert "rollout/ep_rew_mean" not in logged(stats, tmp_path)


# -- lap evaluation -----------------------------------------------------------------------------------------------------


def test_evaluation_times_laps_as_the_engine_does():
    tracks, given = ["track-01", "track-02"], []
    envs = RacerVectorEnv(2, tracks)
    episodes = evaluate(lambda obs: (given.append(drive(obs)), given[-1])[1], envs, tracks)
    assert [len(e.rewards) for e in episodes] == [3000, 3000] and len(given) == 3000
    engine, laps = RacerSim(2, tracks), [[], []]
    for actions in given:
        before = engine.lap
        engine.step(actions)
        for i in np.flatnonzero(engine.lap > before):
            laps[i].append(int(engine.lap_ticks[i]))
    assert [[lap.ticks for lap in e.laps] for e in episodes] == laps and len(laps[0]) >= 3
    assert [lap.flying for lap in episodes[0].laps] == [False, *[True] * (len(laps[0]) - 1)]


def test_many_tracks_are_a_line_each_and_a_summary_with_the_share_of_the_hand_written_driver_s_reward(tmp_path):
    config = short_episodes(tmp_path, 600)
    tracks = [f"random-{number}" for number in range(1, 8)]
    rewards = {track: reward for track, (reward, *_) in hand_written_settings(tracks, config).items()}
    episodes = evaluate(lambda obs: full_throttle(obs, 0.5), RacerVectorEnv(7, tracks, config), tracks)
    results = [summarize([e], load_config(config), rewards[e.track]) for e in episodes]
    shares = [100 * sum(e.rewards) / rewards[e.track] for e in episodes]
    np.testing.assert_allclose([r["percent_of_hand_written"] for r in results], shares)
    worst = int(np.argmin(shares))
    (summary,) = describe_more(results)
    assert f"{np.mean(shares):.1f} % of the reward" in summary and f"{shares[worst]:.1f} % on {tracks[worst]}" in summary
    assert describe_all(results).startswith("7 tracks: ")
    metrics = eval_metrics(results)
    assert metrics["eval/mean_reward"] == pytest.approx(score(episodes)) and len(metrics) <= 15
    assert "eval/random-1/mean_reward" in eval_metrics(results[:2])


@pytest.mark.slow
def test_a_long_track_gets_a_flying_lap_from_a_longer_episode():
    track, driver = "random-2-long", functools.partial(full_throttle, gain=0.5)
    envs = RacerVectorEnv(1, track)
    (episode,) = evaluate(driver, envs, [track])
    result = summarize([episode], envs.config)
    assert len(episode.rewards) == 3000 and result["flying_lap_sec"] is None
    (longer,) = with_flying_laps([result], driver, [track], envs.config)
    assert 90 < longer["percent_of_limit"] < 100.1 and longer["flying_lap_sec"] > 30
    unchanged = set(result) - {"flying_lap_sec", "flying_spread_sec", "percent_of_limit", "cutting"}
    assert all(longer[key] == result[key] for key in unchanged), "the reward is that of the game's episode"
    assert drive_lap("him", driver, track).seconds == pytest.approx(longer["flying_lap_sec"], abs=0.5)


def test_the_fastest_lap_is_cut_out_of_its_episode_from_line_to_line():
    envs = RacerVectorEnv(1, render_mode="rgb_array")
    (episode,) = evaluate(drive, envs, ["track-01"])
    lap = episode.fastest()
    assert lap["track_id"] == "track-01" and len(lap["trajectory"]) == min(lap.ticks for lap in episode.laps) + 1
    track = load_track("track-01")
    ends = lap["trajectory"][[0, -1], :2] - track.position(0.0)
    assert (np.abs(ends @ track.tangent(0.0)) < 5).all() and (np.hypot(*ends.T) < 60).all(), "from line to line"
    (still,) = evaluate(lambda obs: np.zeros((1, 3)), envs, ["track-01"])
    assert still.failed and len(still.fastest()["trajectory"]) == 181, "without a lap, all that it did"


@pytest.mark.slow
def test_the_recorded_rewards_of_the_hand_written_driver_are_those_of_its_best_setting():
    for track, (reward, gain, offset) in best_hand_written(tuple(HAND_WRITTEN)).items():
        assert (reward, gain, offset) == pytest.approx(HAND_WRITTEN[track], abs=5e-5)
        rewards = []
        for setting in ((gain, offset), (1.0, 0.0)):
            drive_so = functools.partial(full_throttle, gain=setting[0], offset=setting[1])
            rewards.append(score(evaluate(drive_so, RacerVectorEnv(1, track), [track])))
        assert rewards[0] == pytest.approx(reward) and rewards[1] < reward
