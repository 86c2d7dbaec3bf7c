"""The best laps known: recorded inputs that drive them, what evaluation makes of them, and drivers that come near."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import args_of, evaluate_run

import ppo_racer
from racer.game.config import DEFAULT_CONFIG_PATH, load_config
from racer.game.limit import limit_seconds
from racer.game.sim import RacerSim
from racer.game.tracks import TRACKS, load_track
from racer.training.evaluation import Episode, describe, eval_metrics, summarize
from racer.training.references import BEST_LAP_TICKS, BEST_REWARD
from racer.view.telemetry import BEST_LAPS

ROOT = Path(__file__).resolve().parent.parent
FASTEST = ROOT / "ai-config-fastest.json"
HELD_OUT = [str(ROOT / "tests" / "tracks" / f"{name}.json") for name in ("esses", "hairpin")]
LAPS = [(kind, track) for kind in ("clean", "any") for track in TRACKS]


def recorded(name: str):
    actions = np.load(BEST_LAPS / f"{name}.npz")["actions"]
    return actions.astype(np.float64)


@pytest.mark.parametrize(("kind", "track"), LAPS)
def test_recorded_inputs_drive_the_best_lap_known(kind, track):
    """From the grid to the end of the lap, on the engine as it is. On the road, if that is the kind."""
    actions = recorded(f"{kind}-{track}")
    sim, crossings, left_road = RacerSim(1, [track]), [0], [0]
    for tick, action in enumerate(actions, start=1):
        lap = sim.lap[0]
        sim.step(action[None])
        if sim.parts["offTrack"][0] < 0 or sim.parts["wall"][0] < 0:
            left_road.append(tick)
        if sim.lap[0] > lap:
            crossings.append(tick)
    assert crossings[-1] == len(actions) and len(crossings) >= 3, "the last input ends a flying lap"
    assert crossings[-1] - crossings[-2] == BEST_LAP_TICKS[kind][track]
    if kind == "clean":
        assert left_road[-1] <= crossings[-2]


@pytest.mark.parametrize("track", TRACKS)
def test_recorded_inputs_earn_the_best_reward_known(track):
    """A whole episode from the grid with the default rewards."""
    sim, actions = RacerSim(1, [track]), recorded(f"reward-{track}")
    earned = sum(sim.step(action[None])[1][0] for action in actions)
    assert len(actions) == 3000 and earned == pytest.approx(BEST_REWARD[track], abs=0.0005)


def episode(track: str, *laps: tuple[int, int], reward: float = 0.0) -> Episode:
    """Laps as (ticks, ticks off the road), the first one from the standing start."""
    total = sum(ticks for ticks, _ in laps)
    off_road = np.concatenate([[False] * (ticks - off) + [True] * off for ticks, off in laps]).astype(bool)
    lap_ticks = np.concatenate([[0] * (ticks - 1) + [ticks] for ticks, _ in laps])
    return Episode.of(track, True, np.full(total, reward / total), off_road, lap_ticks, False, None)


def test_the_limit_binds_clean_laps_and_a_lap_that_cuts_says_so():
    config, limit = load_config(DEFAULT_CONFIG_PATH), limit_seconds(load_track("track-01"))
    half = summarize([episode("track-01", (500, 0), (770, 0), (772, 0))], config)
    assert half["percent_of_limit"] == pytest.approx(100 * limit / (771 / 60)) and not half["cutting"]
    assert f"({half['percent_of_limit']:.1f} % of limit)" in describe(half)
    cutting = summarize([episode("track-01", (500, 0), (378, 90), (700, 0), (370, 90))], config)
    assert cutting["percent_of_limit"] > 100 and cutting["cutting"] and "%, cutting)" in describe(cutting)
    assert (cutting["laps"], cutting["clean_laps"], cutting["best_clean_lap_sec"]) == (4, 2, pytest.approx(500 / 60))
    assert cutting["off_road_share"] == pytest.approx(180 / (500 + 378 + 700 + 370))
    assert summarize([episode("track-01", (500, 0))], config)["percent_of_limit"] is None, "no flying lap"
    usual, fastest = load_config(DEFAULT_CONFIG_PATH), load_config(FASTEST)
    assert fastest["weights"].pop("offTrackPenalty") == 0 > usual["weights"].pop("offTrackPenalty")
    assert usual == fastest, "the two reward files differ in this penalty alone"


def test_the_reward_is_a_share_of_the_best_known_where_that_means_something():
    usual, fastest = load_config(DEFAULT_CONFIG_PATH), load_config(FASTEST)
    half = [episode("track-02", (999, 0), (900, 0), reward=BEST_REWARD["track-02"] / 2)]
    assert summarize(half, usual)["percent_of_best_reward"] == pytest.approx(50.0)
    assert summarize(half, fastest)["percent_of_best_reward"] is None, "other rewards"
    half[0].from_grid = False
    assert summarize(half, usual)["percent_of_best_reward"] is None, "from anywhere"
    assert summarize([episode("random-1", (999, 0), (900, 0), reward=1.0)], usual)["percent_of_best_reward"] is None
    sunk = summarize([episode("track-02", (999, 0), reward=-2.0)], usual, hand_written=3.0)
    assert sunk["percent_of_best_reward"] is None and sunk["percent_of_hand_written"] is None, "not -67 %"


def test_every_track_is_for_itself_and_the_sums_do_not_gain_by_a_failure():
    config = load_config()
    first, second = (summarize([episode(t, (500, 0), (400, 0), reward=2.0)], config) for t in ("track-01", HELD_OUT[0]))
    failed = summarize([Episode(HELD_OUT[0], rewards=np.zeros(1), off_road=np.ones(1, bool))], config)
    metrics = eval_metrics([first, second])
    assert metrics["eval/esses/mean_lap_time_sec"] == pytest.approx(450 / 60) and "eval/mean_lap_time_sec" not in metrics
    assert metrics["eval/track-01/mean_reward"] == pytest.approx(2.0) and metrics["eval/off_road_share"] == 0
    metrics = eval_metrics([first, failed])
    assert not {"eval/mean_lap_time_sec", "eval/best_lap_time_sec", "eval/esses/best_lap_time_sec"} & set(metrics)
    assert metrics["eval/mean_reward"] == pytest.approx(1.0) and metrics["eval/off_road_share"] == 0.5
    assert metrics["eval/track-01/best_clean_lap_time_sec"] == pytest.approx(400 / 60)
    metrics = eval_metrics([first])
    assert metrics["eval/mean_lap_time_sec"] == metrics["eval/track-01/mean_lap_time_sec"], "one track has both"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_driver_laps_from_anywhere_on_every_track_and_on_two_it_has_never_seen(tmp_path, capsys):
    """The three-track default, a quarter as long: 100 random starts a track, and no more than one in a hundred without its laps."""
    tracks = ("--track-id", *TRACKS)
    args = args_of("ppo", *tracks, total_timesteps=2_000_000, run_dir=tmp_path, run_name="run", tensorboard=False)
    ppo_racer.train(args)

    def drive_from(**settings):
        return evaluate_run(tmp_path / "run", **{"episodes": 10, **settings})

    out = tmp_path / "out.json"
    results = drive_from(start="anywhere", episodes=100, json=out)
    assert json.loads(out.read_text()) == results
    results += drive_from(track_id=tuple(HELD_OUT), start="anywhere", episodes=100)
    assert [result["track"] for result in results] == [*TRACKS, "esses", "hairpin"]
    for result in results:
        assert result["failures"] <= 0.01 * result["episodes"], result
        assert result["completion_rate"] >= 0.99 and result["laps"] > result["episodes"], result
    assert re.search(r"\d of 300 episodes failed", capsys.readouterr().out)
    for result in drive_from(episodes=1):
        assert result["percent_of_best_reward"] > 90, result
