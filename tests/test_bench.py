"""The benchmark's own promises: what it returns, how it exits, that it measures what it says. Never how fast."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import wait_for

import bench_racer
from bench_racer import Args, lean, main, run_benchmark
from racer.game.sim import RacerSim
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
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")
def test_a_bench_that_is_terminated_leaves_no_trainer_running():
    command = [sys.executable, "bench_racer.py", "--only", "training", "--total-timesteps", "1000000000"]
    bench = subprocess.Popen(command, cwd=Path(bench_racer.__file__).parent, stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children")
    wait_for(lambda: children.read_text().split(), bench)
    (trainer,) = children.read_text().split()
    bench.terminate()
    assert bench.wait(timeout=30) == 143 and not Path(f"/proc/{trainer}").exists()
