"""Nothing lost: whatever ends a run, it goes on bit for bit; and what a bad checkpoint gets. For both trainers."""

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
from conftest import Failing, Server

import ppo_racer
import sac_racer
from callbacks_lite import read_csv
from racer_sim import TRACKS

ROOT = Path(__file__).resolve().parent.parent
# 16 iterations of 512 steps either way
SETTINGS = {"total_timesteps": 8192, "num_envs": 16, "threads": 1, "eval_every": 4096, "checkpoint_every": 1024}
SETTINGS |= {"tensorboard": False, "start": "anywhere"}
OWN = {
    "ppo": {"rollout_steps": 32, "minibatch_size": 128},
    "sac": {"log_every": 512, "learning_starts": 512, "batch_size": 64, "updates": 2, "buffer_size": 1000},
}
BRIDGE = {"total_timesteps": 600, "num_envs": 2, "start": "grid", "eval_every": 10**9}  # 6 iterations of 100 steps
OWN_BRIDGE = {
    "ppo": {"rollout_steps": 50, "minibatch_size": 50},
    "sac": {"log_every": 100, "learning_starts": 100, "batch_size": 16, "action_repeat": 2},
}


class Lab:
    """One of the trainers, with a run of a second or two."""

    def __init__(self, name: str, folder: Path):
        self.name, self.module = name, {"ppo": ppo_racer, "sac": sac_racer}[name]
        self.Args, self.train = self.module.Args, self.module.train
        self.load, self.evaluate = self.module.load_checkpoint, self.module.evaluate_checkpoint
        self.bridge = {**BRIDGE, **OWN_BRIDGE[name]}
        self.folder, config = folder, folder / "short.json"  # shorter episodes, for shorter evaluations
        config.write_text((ROOT / "ai-config.json").read_text().replace("3000", "900"))
        self.usual = {**SETTINGS, **OWN[name], "config_path": config}

    def settings(self, folder: Path, **changes):
        return self.Args(**{**self.usual, "run_dir": folder, **changes})

    def flags(self, folder: Path, **changes) -> list[str]:
        """The same settings as a command line."""
        result = []
        for name, value in {**self.usual, "run_dir": folder, **changes}.items():
            option = name.replace("_", "-")
            if isinstance(value, bool):
                result.append(f"--{option}" if value else f"--no-{option}")
            elif isinstance(value, tuple):
                result += [f"--{option}", *value]
            else:
                result += [f"--{option}", str(value)]
        return result

    def start(self, folder: Path, *more: str) -> subprocess.Popen:
        script = str(ROOT / f"{self.name}_racer.py")
        command = [sys.executable, script, *(more or [*self.flags(folder), "--run-name", "run"])]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def assert_same_run(self, a: Path, b: Path) -> None:
        """Weights, optimisers, scaler, statistics, generators, cars, replay buffer, best driver, and all metrics but times."""
        x, y = self.load(a), self.load(b)
        if self.name == "sac":
            buffers = [np.load(folder / c["buffer"]) for folder, c in ((a, x), (b, y))]
            assert set(buffers[0]) == set(buffers[1]) and len(buffers[0]["obs"]) == 62
            for name in buffers[0]:
                np.testing.assert_array_equal(buffers[0][name], buffers[1][name])
        for volatile in ("args", "published_beaten", "buffer", "launch"):
            x.pop(volatile, None), y.pop(volatile, None)
        assert_same(x, y)
        assert_same(self.load(a / "best.pt")["agent"], self.load(b / "best.pt")["agent"])
        rows = [
            [{k: v for k, v in r.items() if not k.startswith("time/")} for r in read_csv(f / "metrics.csv")]
            for f in (a, b)
        ]
        assert rows[0] == rows[1] and len(rows[0]) == 16


@pytest.fixture(scope="module", params=["ppo", "sac"])
def lab(request, tmp_path_factory) -> Lab:
    return Lab(request.param, tmp_path_factory.mktemp(request.param))


# What is in both files word for word (test_sac.py compares) is tried with one of them by default.
mostly_shared = pytest.mark.parametrize("lab", ["ppo", pytest.param("sac", marks=pytest.mark.slow)], indirect=True)


@pytest.fixture(scope="module")
def straight(lab) -> Path:
    """The run that was never stopped."""
    return Path(lab.train(lab.settings(lab.folder, run_name="run"))["run_folder"])


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


# -- stopping and going on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iteration", [8, *(pytest.param(i, marks=pytest.mark.slow) for i in (3, 15))])
def test_a_run_stopped_by_ctrl_c_and_resumed_is_the_run_never_stopped(
    lab, tmp_path, monkeypatch, straight, iteration, capsys
):
    learn_once = lab.module.learn_once

    def interrupted(run):
        if run.iteration == iteration - 1:
            signal.raise_signal(signal.SIGINT)
        return learn_once(run)

    with monkeypatch.context() as patch:
        patch.setattr(lab.module, "learn_once", interrupted)
        result = lab.train(lab.settings(tmp_path, run_name="run"))
    assert result["steps"] == iteration * 512 and result["signal"] == signal.SIGINT and not result["finished"]
    assert f"--resume {tmp_path / 'run'}" in capsys.readouterr().out
    resumed = lab.train(lab.Args(resume=tmp_path / "run"))
    assert resumed["finished"] and resumed["run_folder"] == str(tmp_path / "run")
    lab.assert_same_run(straight, tmp_path / "run")


def test_resume_takes_a_file_too_and_goes_back_to_it(lab, tmp_path, straight, capsys):
    shutil.copytree(straight, tmp_path / "run")
    result = lab.train(lab.Args(resume=tmp_path / "run" / "best.pt", total_timesteps=10_240))
    assert result["steps"] == 10_240
    if lab.name == "sac":  # best.pt is a driver, without what it learned from
        assert "no replay buffer was saved with this checkpoint" in capsys.readouterr().out
    lab.train(lab.Args(resume=tmp_path / "run" / "checkpoint.pt", total_timesteps=12_288))
    assert len(read_csv(tmp_path / "run" / "metrics.csv")) == 24


def test_resume_can_extend_a_finished_run(lab, tmp_path, straight):
    shutil.copytree(straight, tmp_path / "run")
    result = lab.train(lab.Args(resume=tmp_path / "run", total_timesteps=10_240))
    assert result["steps"] == 10_240 and len(read_csv(tmp_path / "run" / "metrics.csv")) == 20


def test_resume_refuses_to_change_what_cannot_change(lab, tmp_path, straight):
    shutil.copytree(straight, tmp_path / "run")
    for change, message in (
        ({"num_envs": 32}, "--num-envs is 32, but the run to resume has 16"),
        ({"gamma": 0.9}, "--gamma is 0.9"),
    ):
        with pytest.raises(ValueError, match=message):
            lab.train(lab.Args(resume=tmp_path / "run", **change))


@pytest.mark.slow
@mostly_shared
def test_a_flag_given_on_the_command_line_counts_even_at_its_default_value(lab, tmp_path):
    lab.train(lab.settings(tmp_path, run_name="run", gamma=0.9, checkpoint_every=2048))
    process = lab.start(tmp_path, "--resume", str(tmp_path / "run"), "--gamma", "0.98")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "--gamma is 0.98, but the run to resume has 0.9" in out
    process = lab.start(
        tmp_path, "--resume", str(tmp_path / "run"), "--checkpoint-every", "400000", "--total-timesteps", "9216"
    )
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert lab.load(tmp_path / "run")["args"]["checkpoint_every"] == 400_000


def test_a_finished_run_says_that_there_is_nothing_to_do(lab, tmp_path, straight, capsys):
    shutil.copytree(straight, tmp_path / "run")
    lab.train(lab.Args(resume=tmp_path / "run"))
    assert "nothing to do: the run is at 8,192 of 8,192 steps" in capsys.readouterr().out


@pytest.mark.slow
@mostly_shared
def test_a_moved_run_with_files_of_its_own_goes_on_and_changed_rewards_are_noticed(lab, tmp_path, monkeypatch):
    config, track = tmp_path / "cfg.json", tmp_path / "mine.json"
    config.write_text((ROOT / "ai-config.json").read_text())
    track.write_text(json.dumps({"name": "mine", "control_points": TRACKS["track-01"]}))
    monkeypatch.chdir(tmp_path)
    lab.train(lab.settings(Path("runs"), run_name="run", config_path=Path("cfg.json"), track_id=("mine.json",)))
    elsewhere = tmp_path / "elsewhere"
    shutil.move(tmp_path / "runs" / "run", elsewhere)
    monkeypatch.chdir(ROOT)
    assert lab.train(lab.Args(resume=elsewhere, total_timesteps=9216))["steps"] == 9216
    assert lab.evaluate(lab.Args(evaluate=elsewhere, episodes=1))[0]["track"].endswith("mine.json")
    config.write_text(config.read_text().replace("3000", "500"))
    with pytest.raises(ValueError, match="are not those the run to resume was begun with"):
        lab.train(lab.Args(resume=elsewhere, total_timesteps=10_240))


@mostly_shared
def test_evaluate_takes_the_track_that_is_given(lab, tmp_path, capsys):
    lab.train(lab.settings(tmp_path, run_name="run", track_id=("track-02",)))
    for flag, track in (((), "track-02"), (("track-01",), "track-01")):
        results = lab.evaluate(lab.Args(evaluate=tmp_path / "run", episodes=1, track_id=flag or None))
        assert results[0]["track"] == track
    with pytest.raises(ValueError, match=r"cannot be written .No such file or directory.; give another path"):
        lab.evaluate(lab.Args(evaluate=tmp_path / "run", json=tmp_path / "no" / "out.json"))
    (tmp_path / "run" / "best.pt").unlink()
    assert lab.evaluate(lab.Args(evaluate=tmp_path / "run", episodes=1))[0]["track"] == "track-02"


@mostly_shared
def test_a_signal_saves_though_nobody_reads_what_is_said(lab, tmp_path, monkeypatch):
    """Ctrl+C in `... 2>&1 | tee log` ends tee as well, and then a print fails."""
    meet = lab.module.Run.meet

    def signalled(self, metrics):
        if self.steps == 512 * 3:
            signal.raise_signal(signal.SIGINT)
        return meet(self, metrics)

    monkeypatch.setattr(lab.module.Run, "meet", signalled)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, Failing(BrokenPipeError()))
    result = lab.train(lab.settings(tmp_path, run_name="run", checkpoint_every=10**9))
    assert result["signal"] == signal.SIGINT and result["steps"] == 512 * 3
    assert lab.load(tmp_path / "run")["counters"]["steps"] == 512 * 3


@mostly_shared
def test_a_run_takes_no_folder_with_other_files(lab, tmp_path):
    lab.train(lab.settings(tmp_path, run_name="run", total_timesteps=512))
    other = tmp_path / "thesis"
    other.mkdir()
    shutil.copy(tmp_path / "run" / "best.pt", other / "keep.pt")
    (other / "chapter.tmp").write_text("mine")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "args.json").touch()
    for settings, message in (
        ({"run_name": "thesis"}, "holds other files: empty it, or give another --run-name"),
        ({"run_name": "begun"}, "holds a run without a checkpoint, which may have just begun; remove it, or"),
        ({"run_name": ".."}, "is no plain name"),
        ({"run_name": "a/b"}, "is no plain name"),
        ({"resume": other / "keep.pt"}, "is no run folder .it has no args.json."),
    ):
        with pytest.raises(ValueError, match=message):
            lab.train(lab.settings(tmp_path, **settings))
    assert sorted(file.name for file in other.iterdir()) == ["chapter.tmp", "keep.pt"]
    (other / "keep.pt").rename(other / "best.pt")  # a folder that is given has been meant
    assert lab.train(lab.Args(resume=other, total_timesteps=1024))["steps"] == 1024
    assert (other / "chapter.tmp").read_text() == "mine"


@mostly_shared
def test_a_damaged_best_driver_costs_a_replay_and_not_the_end_of_the_run(lab, tmp_path, monkeypatch, capsys):
    lab.train(lab.settings(tmp_path, run_name="run", total_timesteps=1024))
    (tmp_path / "run" / "best.pt").write_bytes(b"damaged")
    monkeypatch.setattr(lab.module, "score", lambda episodes: -1e9)  # no driver of the second session is the best
    assert lab.train(lab.Args(resume=tmp_path / "run", total_timesteps=2048))["finished"]
    assert "no replay of the best driver: " in capsys.readouterr().err
    assert lab.load(tmp_path / "run" / "checkpoint.pt")["counters"]["steps"] == 2048


@mostly_shared
def test_a_best_driver_that_could_not_be_written_is_not_the_best(lab, tmp_path, monkeypatch):
    """What is announced is what best.pt holds, and a later driver is measured by that."""
    scores = iter([1.0, 3.0, 2.0, 0.0])
    monkeypatch.setattr(lab.module, "score", lambda episodes: scores_now[0])
    save, scores_now = lab.module.Run.save, [None]
    evaluate_run = lab.module.evaluate_run

    def evaluated(run):
        scores_now[0] = next(scores)
        return evaluate_run(run)

    def full(self, name="checkpoint.pt"):
        return False if name == "best.pt" and scores_now[0] == 3.0 else save(self, name)

    monkeypatch.setattr(lab.module, "evaluate_run", evaluated)
    monkeypatch.setattr(lab.module.Run, "save", full)
    result = lab.train(lab.settings(tmp_path, run_name="run", total_timesteps=2048, eval_every=512))
    assert result["best"]["score"] == 2.0 and result["best"]["step"] == 1536
    assert lab.load(tmp_path / "run" / "best.pt")["counters"]["steps"] == 1536


@mostly_shared
def test_a_folder_that_cannot_be_written_is_refused_before_training(lab, tmp_path):
    with pytest.raises(ValueError, match=r"cannot be written .No such file or directory.; nothing would be saved"):
        lab.module.check_writable(tmp_path / "gone")
    lab.module.check_writable(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == []


@mostly_shared
def test_only_flags_count_as_given(lab, tmp_path, monkeypatch):
    """A run folder may be called as a flag is."""
    seen = []
    monkeypatch.setattr(lab.module, "train", lambda args: seen.append(args.given) or {"finished": True, "saved": True})
    monkeypatch.setattr(sys, "argv", ["racer.py", "--resume", "seed", "--total-timesteps=512", "--no-tensorboard"])
    assert lab.module.main() == 0 and seen == [{"resume", "total_timesteps", "tensorboard"}]


@mostly_shared
def test_a_signal_after_the_last_check_still_saves(lab, tmp_path, monkeypatch):
    """Whenever it comes, the run stops with a checkpoint of where it stopped."""
    show = lab.module.Progress.show

    def late(self, steps, *rest):
        show(self, steps, *rest)
        if steps == 512 * 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(lab.module.Progress, "show", late)
    result = lab.train(lab.settings(tmp_path, run_name="run", checkpoint_every=10**9))
    assert result["signal"] == signal.SIGTERM
    assert lab.load(tmp_path / "run")["counters"]["steps"] == result["steps"]


def test_a_run_name_in_use_is_not_overwritten(lab, tmp_path, straight):
    with pytest.raises(ValueError, match="already holds a run; go on with it"):
        lab.train(lab.settings(straight.parent, run_name="run"))


def wait_for_checkpoint(folder: Path, process: subprocess.Popen) -> None:
    until = time.monotonic() + 60
    while not (folder / "run" / "checkpoint.pt").exists():
        assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
        time.sleep(0.01)


def kill_and_resume(lab, folder: Path, straight: Path, kills: int, seed: int) -> None:
    """kill -9 at random moments, each time somewhere in what is left of the run; then to the end."""
    rng = random.Random(seed)
    for kill in range(kills):
        process = lab.start(folder) if kill == 0 else lab.start(folder, "--resume", str(folder / "run"))
        if kill == 0:
            wait_for_checkpoint(folder, process)
        else:
            while not process.stdout.readline().startswith(str(folder)):  # it has begun to drive
                assert process.poll() is None
        time.sleep(rng.uniform(0, 0.25))
        process.kill()
        process.communicate()
        lab.load(folder / "run")  # always a whole one
    process = lab.start(folder, "--resume", str(folder / "run"))
    assert process.wait(100) == 0, process.communicate()[0]
    process.stdout.close()
    lab.assert_same_run(straight, folder / "run")
    assert not list((folder / "run").glob("*.tmp")), "what a killed write left behind is tidied up"


@mostly_shared
def test_kill_minus_9_and_resume_is_the_run_never_stopped(lab, tmp_path, straight):
    kill_and_resume(lab, tmp_path, straight, kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_many_kills_at_random_moments(lab, tmp_path, straight, seed):
    kill_and_resume(lab, tmp_path, straight, kills=6, seed=seed)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals to send to another process")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_say_how_to_go_on_and_exit_with_their_code(lab, tmp_path, number, code):
    process = lab.start(tmp_path, *lab.flags(tmp_path, total_timesteps=10**9, run_name="run"))
    wait_for_checkpoint(tmp_path, process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code, out
    assert f"--resume {tmp_path / 'run'}" in out and "Traceback" not in out
    steps = int(re.search(r"stopped: ([\d,]+) steps", out).group(1).replace(",", ""))
    assert lab.load(tmp_path / "run")["counters"]["steps"] == steps, "saved where it stopped, not before"


# -- writing -----------------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_a_warning_and_not_the_last_checkpoint(lab, tmp_path, monkeypatch, capsys):
    args = lab.settings(tmp_path, run_name="run")
    real, writes = os.fsync, []

    def full(descriptor):
        writes.append(1)
        if len(writes) > 2:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    result = lab.train(args)
    assert result["finished"]
    assert "could not be written (No space left on device); the one before it is untouched" in capsys.readouterr().err
    assert lab.load(tmp_path / "run")["counters"]["steps"] == {"ppo": 2048, "sac": 1024}[lab.name]
    assert not list((tmp_path / "run").glob("*.tmp"))


@mostly_shared
def test_a_run_folder_that_cannot_be_made_is_an_error_at_once(lab, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="cannot be written"):
        lab.train(lab.settings(tmp_path / "file", run_name="run"))


def test_the_run_folder_says_where_it_came_from(lab, straight):
    facts = json.loads((straight / "args.json").read_text())
    assert facts["args"]["num_envs"] == 16 and facts["versions"]["torch"] == torch.__version__
    assert set(facts) == {"args", "command", "commit", "versions", "processes", "launch"}


# -- reading -----------------------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return (os.system, (f"{sys.executable} -c \"open('exploded', 'w')\"",))


def test_a_checkpoint_loads_without_running_code(lab, straight):
    for name in ("checkpoint.pt", "best.pt"):
        assert torch.load(straight / name, weights_only=True)["algorithm"] == lab.name


BAD = ["missing", "truncated", "text", "empty", "pickle", "foreign", "other", "newer", "sizes", "lacking"]
BAD += ["bare", "odd format", "unknown flag", "no counters"]


@mostly_shared
@pytest.mark.parametrize("make", BAD)
@pytest.mark.parametrize("use", ["resume", "evaluate"])
def test_a_bad_checkpoint_is_refused_and_says_why(lab, tmp_path, straight, make, use, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.pt"
    good = lab.load(straight)
    other = "sac" if lab.name == "ppo" else "ppo"
    messages = {
        "missing": "does not exist",
        "foreign": f"not a checkpoint of {lab.name}_racer",
        "other": f"checkpoint of {other}",
    }
    messages |= {
        "newer": "has format 99",
        "sizes": "does not fit|other sizes|cannot change",
        "lacking": "does not fit|other sizes",
    }
    (tmp_path / "args.json").touch()  # as in a run folder
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
        torch.save({**good, "algorithm": other}, path)
    elif make == "newer":
        torch.save({**good, "format": 99}, path)
    elif make == "sizes":
        torch.save({**good, "args": {**good["args"], "hidden": 32}}, path)
    elif make == "lacking":
        torch.save({**good, "agent": {}}, path)
    elif make == "bare":
        torch.save({"algorithm": lab.name, "format": 2}, path)
    elif make == "odd format":
        torch.save({**good, "format": "2"}, path)
    elif make == "unknown flag":
        torch.save({**good, "args": {**good["args"], "warp_drive": True}}, path)
    elif make == "no counters":
        torch.save({k: v for k, v in good.items() if k != "counters"}, path)
    messages |= dict.fromkeys(("bare", "unknown flag", "no counters"), "no whole checkpoint of this version")
    messages["odd format"] = "has format '2', this program knows 2"
    with pytest.raises(ValueError, match=messages.get(make, "is no checkpoint, or a damaged one")):
        if use == "resume":
            lab.train(lab.Args(resume=path))
        else:
            lab.evaluate(lab.Args(evaluate=path, episodes=1))
    assert not (tmp_path / "exploded").exists()


# -- on the real game --------------------------------------------------------------------------------------------------


def test_training_evaluating_and_resuming_on_a_bridge(lab, tmp_path, good_bridge, capsys):
    short = tmp_path / "short.json"
    short.write_text((ROOT / "ai-config.json").read_text().replace("3000", "60"))
    url = (good_bridge.url,)
    result = lab.train(lab.settings(tmp_path, **lab.bridge, run_name="run", bridge_url=url, config_path=short))
    assert result["finished"] and result["steps"] == 600
    resumed = lab.train(lab.Args(resume=tmp_path / "run", total_timesteps=800))
    assert resumed["steps"] == 800
    results = lab.evaluate(lab.Args(evaluate=tmp_path / "run", episodes=2, bridge_url=url))
    assert results[0]["mean_length"] == 60 and "track-01: 2 episodes from the grid" in capsys.readouterr().out


def test_a_driver_drives_the_same_on_both_backends(lab, straight, good_bridge):
    agent = lab.module.restore_agent(lab.load(straight), straight)
    results = []
    for url in (None, good_bridge.url):
        envs = lab.module.RacerVectorEnv(1, bridge_url=url)
        results.append(lab.module.evaluate(agent, envs, ["track-01"]))
        envs.close()
    (episodes, actions), (their_episodes, their_actions) = results
    assert episodes == their_episodes
    np.testing.assert_array_equal(actions, their_actions)


def test_a_bridge_that_dies_leaves_a_checkpoint_and_exit_code_3(lab, tmp_path):
    server = Server("--fault", "die", "--after", "120")
    try:
        process = lab.start(tmp_path, *lab.flags(tmp_path, **lab.bridge, bridge_url=(server.url,), run_name="run"))
        out, _ = process.communicate(timeout=100)
    finally:
        server.kill()
    assert process.returncode == 3, out
    assert "bridge connection" in out and "after 120 steps" in out and "Traceback" not in out
    assert f"--resume {tmp_path / 'run'}" in out
    assert lab.load(tmp_path / "run")["counters"]["steps"] == {"ppo": 200, "sac": 240}[lab.name]
    with pytest.raises(lab.module.BridgeError, match="no game bridge at"):
        lab.train(lab.Args(resume=tmp_path / "run"))


@mostly_shared
def test_no_bridge_is_said_before_anything_is_made(lab, tmp_path):
    with pytest.raises(lab.module.BridgeError, match="no game bridge at"):
        lab.train(lab.settings(tmp_path, **lab.bridge, bridge_url=("ws://127.0.0.1:9",)))
    assert not list(tmp_path.iterdir())
