"""Nothing lost: whatever ends a run, it goes on bit for bit; and what a bad checkpoint gets."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Server

import ppo_racer
from callbacks_lite import read_csv
from ppo_racer import Args, load_checkpoint, train
from racer_sim import TRACKS

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"total_timesteps": 8192, "num_envs": 16, "rollout_steps": 32, "minibatch_size": 128, "threads": 1}
SETTINGS |= {"eval_every": 4096, "checkpoint_every": 1024, "tensorboard": False, "start": "anywhere"}


def settings(folder: Path, **changes) -> Args:
    return Args(**{**SETTINGS, "run_dir": folder, **changes})


def flags(folder: Path, **changes) -> list[str]:
    """The same settings as a command line."""
    result = []
    for name, value in {**SETTINGS, "run_dir": folder, **changes}.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            result.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, tuple):
            result += [f"--{option}", *value]
        else:
            result += [f"--{option}", str(value)]
    return result


def assert_same(a, b, path="checkpoint"):
    if isinstance(a, dict):
        assert set(a) == set(b), path
        for key in a:
            if key != "seconds":  # how long it took is nobody's promise
                assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{i}]")
    else:
        assert a == b or (a != a and b != b), (path, a, b)


def assert_same_run(a: Path, b: Path) -> None:
    """Weights, optimiser, scaler, statistics, generators, cars, best driver, and all metrics but times."""
    x, y = load_checkpoint(a), load_checkpoint(b)
    for volatile in ("args", "published_beaten"):
        x.pop(volatile), y.pop(volatile)
    assert_same(x, y)
    assert_same(load_checkpoint(a / "best.pt")["agent"], load_checkpoint(b / "best.pt")["agent"])
    rows = [
        [{k: v for k, v in r.items() if not k.startswith("time/")} for r in read_csv(f / "metrics.csv")] for f in (a, b)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 16


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The run that was never stopped."""
    return Path(train(settings(tmp_path_factory.mktemp("straight"), run_name="run"))["run_folder"])


# -- stopping and going on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iteration", [3, 8, 15])
def test_a_run_stopped_by_ctrl_c_and_resumed_is_the_run_never_stopped(
    tmp_path, monkeypatch, straight, iteration, capsys
):
    learn_once = ppo_racer.learn_once

    def interrupted(run):
        if run.iteration == iteration - 1:
            signal.raise_signal(signal.SIGINT)
        return learn_once(run)

    with monkeypatch.context() as patch:
        patch.setattr(ppo_racer, "learn_once", interrupted)
        result = train(settings(tmp_path, run_name="run"))
    assert result["steps"] == iteration * 512 and result["signal"] == signal.SIGINT and not result["finished"]
    assert f"--resume {tmp_path / 'run'}" in capsys.readouterr().out
    resumed = train(Args(resume=tmp_path / "run"))
    assert resumed["finished"] and resumed["run_folder"] == str(tmp_path / "run")
    assert_same_run(straight, tmp_path / "run")


def test_resume_takes_a_file_too_and_goes_back_to_it(tmp_path, straight):
    shutil.copytree(straight, tmp_path / "run")
    middle = load_checkpoint(straight / "best.pt")["counters"]["steps"]
    assert 0 < middle < 8192 or middle == 8192
    train(Args(resume=tmp_path / "run" / "best.pt"))
    assert_same_run(straight, tmp_path / "run")


def test_resume_can_extend_a_finished_run(tmp_path, straight):
    shutil.copytree(straight, tmp_path / "run")
    result = train(Args(resume=tmp_path / "run", total_timesteps=10_240))
    assert result["steps"] == 10_240 and len(read_csv(tmp_path / "run" / "metrics.csv")) == 20


def test_resume_refuses_to_change_what_cannot_change(tmp_path, straight):
    shutil.copytree(straight, tmp_path / "run")
    for change, message in (
        ({"num_envs": 32}, "--num-envs is 32, but the run to resume has 16"),
        ({"gamma": 0.9}, "--gamma is 0.9"),
    ):
        with pytest.raises(ValueError, match=message):
            train(Args(resume=tmp_path / "run", **change))


def test_a_flag_given_on_the_command_line_counts_even_at_its_default_value(tmp_path):
    train(settings(tmp_path, run_name="run", gamma=0.9, checkpoint_every=2048))
    process = start(tmp_path, "--resume", str(tmp_path / "run"), "--gamma", "0.98")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "--gamma is 0.98, but the run to resume has 0.9" in out
    process = start(
        tmp_path, "--resume", str(tmp_path / "run"), "--checkpoint-every", "400000", "--total-timesteps", "9216"
    )
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert load_checkpoint(tmp_path / "run")["args"]["checkpoint_every"] == 400_000


def test_a_finished_run_says_that_there_is_nothing_to_do(tmp_path, straight, capsys):
    shutil.copytree(straight, tmp_path / "run")
    train(Args(resume=tmp_path / "run"))
    assert "nothing to do: the run is at 8,192 of 8,192 steps" in capsys.readouterr().out


def test_a_moved_run_with_files_of_its_own_goes_on_and_changed_rewards_are_noticed(tmp_path, monkeypatch):
    config, track = tmp_path / "cfg.json", tmp_path / "mine.json"
    config.write_text((ROOT / "ai-config.json").read_text())
    track.write_text(json.dumps({"name": "mine", "control_points": TRACKS["track-01"]}))
    monkeypatch.chdir(tmp_path)
    train(settings(Path("runs"), run_name="run", config_path=Path("cfg.json"), track_id=("mine.json",)))
    elsewhere = tmp_path / "elsewhere"
    shutil.move(tmp_path / "runs" / "run", elsewhere)
    monkeypatch.chdir(ROOT)
    assert train(Args(resume=elsewhere, total_timesteps=9216))["steps"] == 9216
    assert ppo_racer.evaluate_checkpoint(Args(evaluate=elsewhere, episodes=1))[0]["track"].endswith("mine.json")
    config.write_text(config.read_text().replace("3000", "500"))
    with pytest.raises(ValueError, match="are not those the run to resume was begun with"):
        train(Args(resume=elsewhere, total_timesteps=10_240))


def test_evaluate_takes_the_track_that_is_given(tmp_path, capsys):
    train(settings(tmp_path, run_name="run", track_id=("track-02",)))
    for flag, track in (((), "track-02"), (("track-01",), "track-01")):
        results = ppo_racer.evaluate_checkpoint(Args(evaluate=tmp_path / "run", episodes=1, track_id=flag or None))
        assert results[0]["track"] == track
    with pytest.raises(ValueError, match="there is no such folder"):
        ppo_racer.evaluate_checkpoint(Args(evaluate=tmp_path / "run", json=tmp_path / "no" / "out.json"))
    (tmp_path / "run" / "best.pt").unlink()
    assert ppo_racer.evaluate_checkpoint(Args(evaluate=tmp_path / "run", episodes=1))[0]["track"] == "track-02"


def test_a_signal_after_the_last_check_still_saves(tmp_path, monkeypatch):
    """Whenever it comes, the run stops with a checkpoint of where it stopped."""
    show = ppo_racer.Progress.show

    def late(self, steps, *rest):
        show(self, steps, *rest)
        if steps == 512 * 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ppo_racer.Progress, "show", late)
    result = train(settings(tmp_path, run_name="run", checkpoint_every=10**9))
    assert result["signal"] == signal.SIGTERM
    assert load_checkpoint(tmp_path / "run")["counters"]["steps"] == result["steps"]


def test_a_run_name_in_use_is_not_overwritten(tmp_path, straight):
    with pytest.raises(ValueError, match="already holds a run; go on with it"):
        train(settings(straight.parent, run_name="run"))


def start(folder: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "ppo_racer.py"), *(more or [*flags(folder), "--run-name", "run"])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_checkpoint(folder: Path, process: subprocess.Popen) -> None:
    until = time.monotonic() + 60
    while not (folder / "run" / "checkpoint.pt").exists():
        assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
        time.sleep(0.01)


def kill_and_resume(folder: Path, straight: Path, kills: int, seed: int) -> None:
    """kill -9 at random moments, each time somewhere in what is left of the run; then to the end."""
    rng = random.Random(seed)
    for kill in range(kills):
        process = start(folder) if kill == 0 else start(folder, "--resume", str(folder / "run"))
        if kill == 0:
            wait_for_checkpoint(folder, process)
        else:
            while not process.stdout.readline().startswith(str(folder)):  # it has begun to drive
                assert process.poll() is None
        time.sleep(rng.uniform(0, 0.25))
        process.kill()
        process.communicate()
        load_checkpoint(folder / "run")  # always a whole one
    process = start(folder, "--resume", str(folder / "run"))
    assert process.wait(100) == 0, process.communicate()[0]
    process.stdout.close()
    assert_same_run(straight, folder / "run")
    assert not list((folder / "run").glob("*.tmp")), "what a killed write left behind is tidied up"


def test_kill_minus_9_and_resume_is_the_run_never_stopped(tmp_path, straight):
    kill_and_resume(tmp_path, straight, kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_many_kills_at_random_moments(tmp_path, straight, seed):
    kill_and_resume(tmp_path, straight, kills=6, seed=seed)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals to send to another process")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_say_how_to_go_on_and_exit_with_their_code(tmp_path, number, code):
    process = start(tmp_path, *flags(tmp_path, total_timesteps=10**9, run_name="run"))
    wait_for_checkpoint(tmp_path, process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code, out
    assert f"--resume {tmp_path / 'run'}" in out and "Traceback" not in out
    steps = int(re.search(r"stopped: ([\d,]+) steps", out).group(1).replace(",", ""))
    assert load_checkpoint(tmp_path / "run")["counters"]["steps"] == steps, "saved where it stopped, not before"


# -- writing -----------------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_a_warning_and_not_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    args = settings(tmp_path, run_name="run")
    real, writes = os.fsync, []

    def full(descriptor):
        writes.append(1)
        if len(writes) > 2:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    result = train(args)
    assert result["finished"]
    assert "could not be written (No space left on device); the one before it is untouched" in capsys.readouterr().err
    assert load_checkpoint(tmp_path / "run")["counters"]["steps"] == 2048
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_a_run_folder_that_cannot_be_made_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="cannot be written"):
        train(settings(tmp_path / "file", run_name="run"))


def test_the_run_folder_says_where_it_came_from(straight):
    facts = json.loads((straight / "args.json").read_text())
    assert facts["args"]["num_envs"] == 16 and facts["versions"]["torch"] == torch.__version__
    assert set(facts) == {"args", "command", "commit", "versions"}


# -- reading -----------------------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return (os.system, (f"{sys.executable} -c \"open('exploded', 'w')\"",))


def test_a_checkpoint_loads_without_running_code(straight):
    for name in ("checkpoint.pt", "best.pt"):
        assert torch.load(straight / name, weights_only=True)["algorithm"] == "ppo"


BAD = ["missing", "truncated", "text", "empty", "pickle", "foreign", "other", "newer", "sizes", "lacking"]
BAD += ["bare", "odd format", "unknown flag", "no counters"]


@pytest.mark.parametrize("make", BAD)
@pytest.mark.parametrize("use", ["resume", "evaluate"])
def test_a_bad_checkpoint_is_refused_and_says_why(tmp_path, straight, make, use, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.pt"
    good = load_checkpoint(straight)
    messages = {"missing": "does not exist", "foreign": "not a checkpoint of ppo_racer", "other": "checkpoint of sac"}
    messages |= {
        "newer": "has format 99",
        "sizes": "does not fit|other sizes|cannot change",
        "lacking": "does not fit|other sizes",
    }
    if make == "truncated":
        whole = (straight / "checkpoint.pt").read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif make in ("text", "empty"):
        path.write_text("hello" if make == "text" else "")
    elif make == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    elif make == "foreign":
        torch.save({"weights": torch.zeros(3)}, path)
    elif make == "other":
        torch.save({**good, "algorithm": "sac"}, path)
    elif make == "newer":
        torch.save({**good, "format": 99}, path)
    elif make == "sizes":
        torch.save({**good, "args": {**good["args"], "hidden": 32}}, path)
    elif make == "lacking":
        torch.save({**good, "agent": {}}, path)
    elif make == "bare":
        torch.save({"algorithm": "ppo", "format": 1}, path)
    elif make == "odd format":
        torch.save({**good, "format": "1"}, path)
    elif make == "unknown flag":
        torch.save({**good, "args": {**good["args"], "warp_drive": True}}, path)
    elif make == "no counters":
        torch.save({k: v for k, v in good.items() if k != "counters"}, path)
    messages |= dict.fromkeys(("bare", "unknown flag", "no counters"), "no whole checkpoint of this version")
    messages["odd format"] = "has format 1, this program knows up to"
    with pytest.raises(ValueError, match=messages.get(make, "is no checkpoint, or a damaged one")):
        if use == "resume":
            train(Args(resume=path))
        else:
            ppo_racer.evaluate_checkpoint(Args(evaluate=path, episodes=1))
    assert not (tmp_path / "exploded").exists()


# -- on the real game --------------------------------------------------------------------------------------------------

BRIDGE = {
    "total_timesteps": 600,
    "num_envs": 2,
    "rollout_steps": 50,
    "minibatch_size": 50,
    "start": "grid",
    "eval_every": 10**9,
}


def test_training_evaluating_and_resuming_on_a_bridge(tmp_path, good_bridge, capsys):
    short = tmp_path / "short.json"
    short.write_text((ROOT / "ai-config.json").read_text().replace("3000", "60"))
    url = (good_bridge.url,)
    result = train(settings(tmp_path, **BRIDGE, run_name="run", bridge_url=url, config_path=short))
    assert result["finished"] and result["steps"] == 600
    resumed = train(Args(resume=tmp_path / "run", total_timesteps=800))
    assert resumed["steps"] == 800
    results = ppo_racer.evaluate_checkpoint(Args(evaluate=tmp_path / "run", episodes=2, bridge_url=url))
    assert results[0]["mean_length"] == 60 and "track-01: 2 episodes from the grid" in capsys.readouterr().out


def test_a_driver_drives_the_same_on_both_backends(straight, good_bridge):
    agent = ppo_racer.restore_agent(load_checkpoint(straight), straight)
    results = []
    for url in (None, good_bridge.url):
        envs = ppo_racer.RacerVectorEnv(1, bridge_url=url)
        results.append(ppo_racer.evaluate(agent, envs, ["track-01"]))
        envs.close()
    (episodes, actions), (their_episodes, their_actions) = results
    assert episodes == their_episodes
    np.testing.assert_array_equal(actions, their_actions)


def test_a_bridge_that_dies_leaves_a_checkpoint_and_exit_code_3(tmp_path):
    server = Server("--fault", "die", "--after", "120")
    try:
        process = start(tmp_path, *flags(tmp_path, **BRIDGE, bridge_url=(server.url,), run_name="run"))
        out, _ = process.communicate(timeout=100)
    finally:
        server.kill()
    assert process.returncode == 3, out
    assert "bridge connection" in out and "after 120 steps" in out and "Traceback" not in out
    assert f"--resume {tmp_path / 'run'}" in out
    assert load_checkpoint(tmp_path / "run")["counters"]["steps"] == 200
    with pytest.raises(ppo_racer.BridgeError, match="no game bridge at"):
        train(Args(resume=tmp_path / "run"))


def test_no_bridge_is_said_before_anything_is_made(tmp_path):
    with pytest.raises(ppo_racer.BridgeError, match="no game bridge at"):
        train(settings(tmp_path, **BRIDGE, bridge_url=("ws://127.0.0.1:9",)))
    assert not list(tmp_path.iterdir())
