"""The benchmark's own promises: what it returns, how it exits, that it measures what it says. Never how fast."""

from __future__ import annotations

import importlib
import json
import math
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY, short_episodes, wait_for

import bench_racer
import sac_racer
from bench_racer import Args, lean, main, run_benchmark
from racer.game.sim import RacerSim
from racer.game.tracks import TRACKS
from racer_env import RacerVectorEnv

KEYS = {"steps_per_sec", "mean_ms", "p50_ms", "p95_ms", "p99_ms", "passed"}
QUICK = {"steps": 5, "warmup": 2, "repeats": 1}


def test_run_benchmark_returns_its_numbers():
    result = run_benchmark(steps=20, target=1.0, warmup=3, num_envs=16)
    assert set(result) >= KEYS and result["passed"] is True
    assert result["p50_ms"] <= result["p95_ms"] <= result["p99_ms"]
    assert result["steps_per_sec"] == pytest.approx(16e3 / result["mean_ms"], rel=0.01), "of all cars"
    assert run_benchmark(steps=5, target=1e15, warmup=0)["passed"] is False


def test_warmup_is_not_timed(monkeypatch):
    """Three calls that take long, then quick ones: what a start looks like."""
    real, calls = RacerVectorEnv.step, []

    def slow_at_first(self, actions):
        calls.append(actions)
        time.sleep(0.2 if len(calls) <= 3 else 0.0)
        return real(self, actions)

    monkeypatch.setattr(RacerVectorEnv, "step", slow_at_first)
    assert run_benchmark(steps=10, warmup=3, repeats=1)["p99_ms"] < 200 and len(calls) == 13


def test_exit_code_says_whether_the_target_was_reached(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench_racer, "CAR_COUNTS", (1, 4))
    path = tmp_path / "out.json"
    assert main(Args(**QUICK, only=("environment",), target=1.0, json=path)) == 0
    assert "reached" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert [row["label"] for row in written["rows"]] == ["1", "4", "1,024 on 3 tracks", "1,024 in the walls"]
    assert written["passed"] and set(written["rows"][0]) >= KEYS and written["machine"]["cores"]
    assert main(Args(**QUICK, only=("environment",), target=1e15)) == 1
    assert "MISSED" in capsys.readouterr().out


def test_the_bridge_is_measured_with_one_and_many_connections(good_bridge, capsys, tmp_path):
    path = tmp_path / "out.json"
    assert main(Args(**QUICK, bridge_url=(good_bridge.url,), num_envs=3, target=1.0, json=path)) == 0
    assert [row["num_envs"] for row in json.loads(path.read_text())["rows"]] == [1, 3]


def test_no_bridge_is_exit_code_2(capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert main(Args(**QUICK, bridge_url=(f"ws://127.0.0.1:{port}",))) == 2
    assert "no game bridge at" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("repeats", 0), ("warmup", -1), ("num_envs", 0)])
def test_bad_flags_are_named(name, value):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is {value}"):
        Args(**{name: value})


def test_nonsense_is_refused_before_anything_is_measured(tmp_path, capsys):
    assert main(Args(**QUICK, json=tmp_path / "no" / "such" / "folder.json")) == 2
    assert "folder.json" in capsys.readouterr().err


def test_the_drivers_do_what_the_rows_say():
    driving, leaning = RacerVectorEnv(64, start="anywhere"), RacerSim(64, start="anywhere")
    observations, _ = driving.reset(seed=0)
    leaned = leaning.observe()
    contacts, leaning_contacts = [], []
    for _ in range(250):
        observations, *_, infos = driving.step(bench_racer.drive(observations))
        contacts.append(infos["wallContact"].mean())
        leaned, *_ = leaning.step(lean(leaned))
        leaning_contacts.append(leaning.wall_contact.mean())
    assert infos["rawSpeed"].mean() > 60 and np.mean(contacts[100:]) < 0.05, "cars that drive"
    assert np.mean(leaning_contacts[150:]) > 0.5, "most cars are in the walls"


@pytest.mark.slow
def test_training_is_measured_from_the_start_of_the_process(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_racer, "ALGORITHMS", ("ppo",))
    path = tmp_path / "out.json"
    assert main(Args(only=("training",), total_timesteps=10_000, json=path)) == 0
    (row,) = json.loads(path.read_text())["training"]
    assert row["steps"] >= 10_000 and row["seconds_to_lap"] is None and row["runs"] == 1
    assert (
        row["steps_per_sec"] == pytest.approx(row["steps"] / row["seconds"])
        and row["steps_per_sec"] < row["loop_steps_per_sec"]
    )
    out = capsys.readouterr().out
    assert "learning" in out and "environment" in out and "a step takes" in out


def test_rows_are_reported_by_their_medians():
    rows = [{"rate": rate, "own": own} for rate, own in ((10.0, "a"), (30.0, "b"), (20.0, "c"))]
    assert bench_racer.median_row(rows, "rate") == {"rate": 20.0, "own": "c", "spread": 1.0}


@pytest.mark.slow
def test_the_hand_written_driver_has_learned_nothing_and_laps_every_track(tmp_path, capsys):
    """Its numbers are recorded ones, so that nobody compares with another driver."""
    path = tmp_path / "out.json"
    assert main(Args(only=("drivers",), json=path)) == 0
    rows = json.loads(path.read_text())["drivers"]
    one, best = rows[::2], rows[1::2]
    assert [row["track"] for row in one] == list(TRACKS) and {row["label"] for row in one} == {"hand-written"}
    assert [round(row["flying_lap_sec"], 3) for row in one] == [6.467, 16.150, 16.933]
    assert [round(row["mean_reward"], 3) for row in one] == [6.627, 2.964, 2.328]
    for few, most in zip(one, best, strict=True):
        assert most["mean_reward"] > few["mean_reward"] and most["off_road_share"] < few["off_road_share"]
    assert "off the road 27.9 %" in capsys.readouterr().out


@pytest.mark.slow
def test_a_trained_driver_stands_beside_it_and_what_is_none_is_named(tmp_path, capsys):
    settings = {**TINY["sac"], "total_timesteps": 512, "config_path": short_episodes(tmp_path, 50)}
    folder = sac_racer.train(sac_racer.Args(**settings, run_dir=tmp_path))["run_folder"]
    assert main(Args(only=("drivers",), checkpoint=(Path(folder),), track_id=("track-02",))) == 0
    assert f"{folder} " in capsys.readouterr().out
    assert main(Args(only=("drivers",), checkpoint=(tmp_path / "none.pt",))) == 2
    assert "none.pt does not exist" in capsys.readouterr().err


def test_a_lap_time_holds_from_the_evaluation_after_which_it_is_never_lost_again():
    evaluations = [(1, 6.0, 0.1), (2, 8.0, 0.2), (3, 7.0, 0.3), (4, 6.9, 0.4)]
    assert bench_racer.holds_from(evaluations, target=7.367) == (3, 0.3)
    assert bench_racer.holds_from([*evaluations, (5, None, 0.5)], target=7.367) == (math.inf, math.inf)
    assert bench_racer.holds_from([(1, 6.0, 0.1)], target=7.367) == (1, 0.1)


@pytest.mark.slow
def test_results_are_medians_and_worst_of_the_seeds_that_are_asked_for(tmp_path, capsys, monkeypatch):
    config = short_episodes(tmp_path, 500)
    more = "--total-timesteps 50000 --num-envs 64 --action-repeat 1 --rollout-steps 32 --eval-every 20000"
    more += f" --config-path {config} --no-tensorboard"
    monkeypatch.setattr(bench_racer, "RESULTS", (("ppo", f"--random-tracks 2 {more}"),))
    monkeypatch.setattr(bench_racer, "UNSEEN", ("random-3", "random-4"))
    monkeypatch.setattr(bench_racer, "STARTS_PER_TRACK", 2)
    path = tmp_path / "out.json"
    assert main(Args(only=("results",), seeds=(7, 8), json=path)) == 0
    *drivers, many = json.loads(path.read_text())["results"]
    assert len(drivers) == 6, "the hand-written one with one setting and with its best, on the game's three tracks"
    rewards = [found["results"][0]["mean_reward"] for found in many["unseen"]]
    out = capsys.readouterr().out
    assert many["seeds"] == [7, 8] and rewards[0] != rewards[1] and f"/ {min(rewards):.3f}" in out
    assert [step for step, *_ in many["runs"][0]["evaluations"]] == [20_480, 40_960, 51_200]
    assert len(many["unseen"]) == 2 and all(found["episodes"] == 4 for found in many["unseen"]) and "of 2 unseen" in out
    assert [result["track"] for result in many["unseen"][0]["results"]] == ["track-01", "track-02", "track-03"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")
def test_a_bench_that_is_terminated_leaves_no_trainer_running():
    command = [sys.executable, "bench_racer.py", "--only", "training", "--total-timesteps", "1000000000"]
    bench = subprocess.Popen(command, cwd=Path(bench_racer.__file__).parent, stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children")
    wait_for(lambda: children.read_text().split(), bench)
    (trainer,) = children.read_text().split()
    bench.terminate()
    assert bench.wait(timeout=30) == 143 and not Path(f"/proc/{trainer}").exists()


def test_peers_train_beside_ours(monkeypatch, tmp_path, capsys):
    pytest.importorskip("stable_baselines3", reason="needs stable-baselines3")
    peers = importlib.import_module("racer.peers")
    monkeypatch.setattr(peers, "PEERS", {"small PPO": ("PPO", 256, 2, {"n_steps": 64, "gamma": 0.98})})
    monkeypatch.setattr(peers, "EVAL_EVERY", 128)
    monkeypatch.setattr(bench_racer, "OURS_BESIDE_PEERS", ("ppo_racer.py --total-timesteps 9216 --eval-every 4608",))
    ours, theirs = bench_racer.bench_peers(Args(only=("peers",)))
    assert ours["runs"][0]["steps"] == 9216 and theirs["runs"][0]["steps"] == 256
    assert [step for step, *_ in theirs["runs"][0]["evaluations"]] == [128, 256]
    assert "small PPO" in capsys.readouterr().out


def test_without_stable_baselines3_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(ValueError, match="pip install stable-baselines3"):
        importlib.import_module("racer.peers").train_peer("SB3 PPO, tuned", 1)
