"""Nothing lost: whatever ends a run, it resumes bit-exact; and what a bad checkpoint gets. For both trainers."""

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
from conftest import (
    MODULES, ROOT, TINY, TINY_BRIDGE, Failing, args_of, assert_same, driver_of, evaluate_run, load, preset, resume, short_episodes,
    steps_of, wait_for,
)  # fmt: skip

from callbacks_lite import read_csv
from racer.game.bridge import BridgeError
from racer.game.config import DEFAULT_CONFIG_PATH
from racer.game.rewards import REWARD_TERMS
from racer.game.tracks import TRACKS
from racer.training import checkpoints
from racer.training import run as run_module
from racer.training.evaluation import Episode, evaluate
from racer.training.references import hand_written_settings
from racer.training.run import Run
from racer.training.terminal import ProgressLine
from racer_env import RacerVectorEnv


class Lab:
    """One of the trainers, with a run of 16 iterations that takes a second or two."""

    def __init__(self, name: str, folder: Path):
        self.name, self.module, self.folder = name, MODULES[name], folder
        self.usual = {**TINY[name], "total_timesteps": 8192, "eval_every": 4096, "checkpoint_every": 1024}
        self.usual |= {"start": "anywhere", "config_path": short_episodes(folder, 300), "stuck_ticks": 60}
        self.usual |= {"noise_memory": 0.8, "actor_learning_rate": 1e-4} if name == "sac" else {}
        self.bridge = {**self.usual, **TINY_BRIDGE[name], "total_timesteps": 600}

    def settings(self, folder: Path, **changes) -> dict:
        return {**self.usual, "run_dir": folder, "run_name": "run", **changes}

    def train(self, folder: Path, **changes) -> dict:
        return self.module.train(self.module.Args(**self.settings(folder, **changes)))

    def resume(self, path: Path, **changes) -> dict:
        return resume(self.name, path, **changes)

    def evaluate(self, path: Path, **settings) -> list[dict]:
        return evaluate_run(path, **settings)

    def load(self, path: Path) -> dict:
        return load(self.name, path)

    def assert_same_run(self, a: Path, b: Path) -> None:
        """Weights, optimisers, scaler, statistics, generators, cars, replay buffer, best driver, and all metrics but times."""
        x, y = self.load(a), self.load(b)
        expected = {"agent", "scaler", "envs", "generator", "stats"}
        sac = {"actor_optimizer", "critic_optimizer", "noise", "buffer"}
        expected |= {"optimizer"} if self.name == "ppo" else sac
        assert set(x["parts"]) == expected
        for checkpoint in (x, y):
            checkpoint.pop("args")
            checkpoint["run"].pop("seconds_before")  # how long it took is nobody's promise
        assert_same(x, y)
        assert_same(self.load(a / "best.pt")["parts"]["agent"], self.load(b / "best.pt")["parts"]["agent"])
        rows = [
            [{k: v for k, v in r.items() if not k.startswith("time/")} for r in read_csv(f / "metrics.csv")] for f in (a, b)
        ]
        assert rows[0] == rows[1] and len(rows[0]) == 16


@pytest.fixture(scope="module", params=["ppo", "sac"])
def lab(request, tmp_path_factory) -> Lab:
    return Lab(request.param, tmp_path_factory.mktemp(request.param))


# What does not depend on the algorithm is tried with one of them by default.
mostly_shared = pytest.mark.parametrize("lab", ["ppo", pytest.param("sac", marks=pytest.mark.slow)], indirect=True)


@pytest.fixture(scope="module")
def straight(lab) -> Path:
    """The run that was never stopped."""
    return Path(lab.train(lab.folder)["run_folder"])


def test_same_seed_same_numbers_and_another_seed_others(lab, tmp_path, straight):
    for seed in (1, 2):
        lab.train(tmp_path, seed=seed, run_name=str(seed), total_timesteps=512)
        first, usual = (read_csv(folder / "metrics.csv")[0] for folder in (tmp_path / str(seed), straight))
        assert (first["reward/progress"] == usual["reward/progress"]) == (seed == 1)


def at_step(monkeypatch, method: str, steps: int, action) -> None:
    """Do something when a run calls a method of its own at this step."""
    real = getattr(Run, method)

    def wrapped(self, *arguments):
        if self.steps == steps:
            action()
        return real(self, *arguments)

    monkeypatch.setattr(Run, method, wrapped)


# -- stopping and going on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iteration", [8, *(pytest.param(i, marks=pytest.mark.slow) for i in (3, 15))])
def test_a_run_stopped_by_ctrl_c_and_resumed_is_the_run_never_stopped(lab, tmp_path, monkeypatch, straight, iteration, capsys):
    with monkeypatch.context() as patch:
        at_step(patch, "_log", iteration * 512, lambda: signal.raise_signal(signal.SIGINT))
        result = lab.train(tmp_path)
    assert result["steps"] == iteration * 512 and result["signal"] == signal.SIGINT and not result["finished"]
    assert f"--resume {tmp_path / 'run'}" in capsys.readouterr().out
    resumed = lab.resume(tmp_path / "run")
    assert resumed["finished"] and resumed["run_folder"] == str(tmp_path / "run")
    lab.assert_same_run(straight, tmp_path / "run")


@mostly_shared
def test_an_older_file_is_not_resumed_over_a_later_one(lab, tmp_path, monkeypatch):
    """best.pt of step 4,096 in a run of 8,192 steps: the later checkpoint and its rows are not lost."""
    scores = iter([1.0, *[0.0] * 9])
    monkeypatch.setattr(run_module, "score", lambda episodes: next(scores))
    lab.train(tmp_path)
    run = tmp_path / "run"
    assert steps_of(lab.name, run / "best.pt") == 4096
    with pytest.raises(ValueError, match=r"is of step 4,096, .* has reached step 8,192: resume .* --start-from"):
        lab.resume(run / "best.pt", total_timesteps=10_240)
    (run / "checkpoint.pt").write_text("damaged")
    assert lab.resume(run / "best.pt", total_timesteps=4608)["steps"] == 4608
    assert [int(row["step"]) for row in read_csv(run / "metrics.csv")] == list(range(512, 4609, 512))


@mostly_shared
def test_a_run_that_is_still_going_is_not_resumed(lab, tmp_path, start):
    process = start(lab.name, **lab.settings(tmp_path, total_timesteps=10**9))
    wait_for((tmp_path / "run" / "checkpoint.pt").exists, process)
    with pytest.raises(ValueError, match="is in use by another process"):
        lab.resume(tmp_path / "run")
    process.kill()
    process.wait()
    steps = steps_of(lab.name, tmp_path / "run")
    assert lab.resume(tmp_path / "run", total_timesteps=steps + 512)["steps"] == steps + 512, "a killed run leaves no lock"


@mostly_shared
def test_two_runs_of_the_same_second_have_a_folder_each(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    args = lab.module.Args(**lab.settings(tmp_path, run_name=""))
    folders = [checkpoints.make_run_folder(lab.name, args, Path(__file__)) for _ in range(3)]
    assert [f.name for f in folders] == [f"{lab.name}-track-01-s1-now{n}" for n in ("", "-2", "-3")]
    assert (folders[0] / Path(__file__).name).exists(), "with the trainer that made it"
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    with pytest.raises(ValueError, match="choose another --run-dir"):
        checkpoints.make_run_folder(lab.name, lab.module.Args(**lab.settings(tmp_path / "link", run_name="")))


@mostly_shared
def test_resume_refuses_to_change_what_cannot_change(lab, straight):
    for change, message in (
        ({"num_envs": 32}, "--num-envs is 32, but the run to resume has 16, and that cannot change"),
        ({"gamma": 0.9}, "--gamma is 0.9"),
        ({"run_name": "b"}, "--run-name is b, but the run to resume has run"),
    ):
        with pytest.raises(ValueError, match=message):
            lab.resume(straight, **change)


@mostly_shared
def test_best_pt_resumes_bit_for_bit_too(lab, tmp_path, straight):
    shutil.copytree(straight, tmp_path / "run")
    (tmp_path / "run" / "checkpoint.pt").unlink()
    assert lab.resume(tmp_path / "run")["finished"]
    lab.assert_same_run(straight, tmp_path / "run")


@mostly_shared
def test_a_loose_checkpoint_is_not_resumed_among_other_files(lab, tmp_path, straight):
    shutil.copy(straight / "best.pt", tmp_path / "keep.pt")
    with pytest.raises(ValueError, match=r"args\.json"):
        lab.resume(tmp_path / "keep.pt")
    assert [file.name for file in tmp_path.iterdir()] == ["keep.pt"]


@mostly_shared
def test_a_finished_run_says_that_there_is_nothing_to_do(lab, tmp_path, straight, capsys):
    shutil.copytree(straight, tmp_path / "run")
    before = (tmp_path / "run" / "summary.json").read_text()
    lab.resume(tmp_path / "run")
    assert "nothing to do: the run is at 8,192 of 8,192 steps" in capsys.readouterr().out
    assert (tmp_path / "run" / "summary.json").read_text() == before


@mostly_shared
def test_a_moved_run_with_moved_files_resumes_and_changed_rewards_or_tracks_are_noticed(lab, tmp_path, monkeypatch):
    config, track = tmp_path / "cfg.json", tmp_path / "mine.json"
    config.write_text("\ufeff" + lab.usual["config_path"].read_text(), encoding="utf-8")  # as Notepad writes it
    track.write_text(json.dumps({"name": "mine", "control_points": TRACKS["track-01"]}))
    monkeypatch.chdir(tmp_path)
    files = {"config_path": Path("cfg.json"), "track_id": ("mine.json",)}
    assert MODULES[lab.name].Args(**files).tracks == (str(track.resolve()),), "its laps have one name before and after"
    lab.train(Path("runs"), **files, total_timesteps=1024)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(tmp_path / "runs" / "run", elsewhere)
    assert lab.resume(elsewhere, total_timesteps=1536, track_id=("mine.json",))["steps"] == 1536, "the same, as it was typed"
    (tmp_path / "files").mkdir()
    for file in (config, track):
        shutil.move(file, tmp_path / "files")
    moved = {"config_path": tmp_path / "files" / "cfg.json", "track_id": (tmp_path / "files" / "mine.json",)}
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=r"mine\.json cannot be read"):
        lab.resume(elsewhere, total_timesteps=2048)
    assert lab.resume(elsewhere, total_timesteps=2048, **moved)["steps"] == 2048
    assert lab.evaluate(elsewhere, track_id=(str(moved["track_id"][0]),))[0]["track"] == "mine"
    moved["config_path"].write_text(moved["config_path"].read_text().replace("300", "500"))
    with pytest.raises(ValueError, match="are not those that the run began with"):
        lab.resume(elsewhere, total_timesteps=2560)
    moved["config_path"].write_text(moved["config_path"].read_text().replace("500", "300"))
    moved["track_id"][0].write_text(json.dumps({"name": "mine", "control_points": TRACKS["track-02"]}))
    with pytest.raises(ValueError, match="of other tracks"):
        lab.resume(elsewhere, total_timesteps=2560)
    with pytest.raises(ValueError, match="--track-id cannot change"):
        lab.resume(elsewhere, total_timesteps=2560, track_id=("track-02",))


@mostly_shared
def test_a_track_file_that_is_deleted_while_a_run_goes_on_changes_nothing(lab, tmp_path, monkeypatch):
    track = tmp_path / "mine.json"
    track.write_text(json.dumps({"name": "mine", "control_points": TRACKS["track-01"]}))
    at_step(monkeypatch, "_log", 512, track.unlink)
    result = lab.train(tmp_path, track_id=(track,), total_timesteps=1024, eval_every=512, pictures=True)
    assert result["finished"] and (tmp_path / "run" / "race.html").exists() and not track.exists()


@mostly_shared
def test_a_run_can_begin_with_the_networks_of_another(lab, tmp_path):
    """With their sizes and what they see, on another track, and with its own settings else."""
    lab.train(tmp_path, run_name="first", total_timesteps=1024, hidden=32, hide_arc=True)
    first = lab.load(tmp_path / "first")["parts"]["agent"]
    still = {"learning_rate": 0.0, **({"actor_learning_rate": 0.0, "tau": 1e-9} if lab.name == "sac" else {})}
    settings = lab.settings(tmp_path, run_name="second", total_timesteps=512, config_path=lab.usual["config_path"], **still)
    args = args_of(lab.name, "--start-from", tmp_path / "first", "--track-id", "track-02", **settings)
    assert args.hidden == 32 and args.hide_arc and args.total_timesteps == 512
    result = lab.module.train(args)
    second = lab.load(tmp_path / "second")
    assert_same(first, second["parts"]["agent"])
    assert second["run"]["steps"] == 512, "a run of its own"
    other = args_of(lab.name, "--start-from", tmp_path / "first", **{**settings, "hidden": 16, "run_name": "third"})
    with pytest.raises(ValueError, match="--hidden is 16"):
        lab.module.train(other)
    for flag in (("--init-std", 0.1), ("--no-hide-arc",)):  # the loaded networks would overwrite these
        with pytest.raises(ValueError, match=flag[0].replace("no-", "")):
            lab.module.train(args_of(lab.name, "--start-from", tmp_path / "first", *flag, **settings | {"run_name": "third"}))
    assert not (tmp_path / "third").exists()
    start = read_csv(tmp_path / "second" / "metrics.csv")[0]
    assert start["step"] == "0" and float(start["eval/mean_reward"]) == result["start_results"][0]["mean_reward"]
    usual = args_of(lab.name, "--start-from", tmp_path / "first")
    assert usual.total_timesteps == preset(lab.name, "--start-from")["total_timesteps"]
    slow = args_of(lab.name, "--start-from", tmp_path / "first", "--slow-game")
    assert slow.num_envs == preset(lab.name, "--slow-game")["num_envs"] and slow.start == "grid", "steps are still slow"
    shutil.rmtree(tmp_path / "first")
    assert resume(lab.name, tmp_path / "second", total_timesteps=1024)["steps"] == 1024, "it needs the other no more"


@mostly_shared
def test_evaluate_takes_the_tracks_of_the_training_or_those_that_are_given(lab, tmp_path):
    lab.train(tmp_path, track_id=("track-02",), total_timesteps=512)
    for given, track in (({}, "track-02"), ({"track_id": ("track-01",)}, "track-01")):
        (result,) = lab.evaluate(tmp_path / "run", **given)
        assert result["track"] == track
    with pytest.raises(ValueError, match=r"cannot write .*out\.json: No such file"):
        lab.evaluate(tmp_path / "run", json=tmp_path / "no" / "out.json")
    (tmp_path / "run" / "best.pt").unlink()
    assert lab.evaluate(tmp_path / "run")[0]["track"] == "track-02"


@mostly_shared
def test_a_signal_saves_though_nobody_reads_what_is_said(lab, tmp_path, monkeypatch):
    """Ctrl+C in `... 2>&1 | tee log` ends tee as well, and then a print fails."""
    at_step(monkeypatch, "_log", 512 * 3, lambda: signal.raise_signal(signal.SIGINT))
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, Failing(BrokenPipeError()))
    result = lab.train(tmp_path, checkpoint_every=10**9)
    assert result["signal"] == signal.SIGINT and steps_of(lab.name, tmp_path / "run") == result["steps"] == 512 * 3


@mostly_shared
def test_a_signal_after_the_last_check_still_saves(lab, tmp_path, monkeypatch):
    """Whenever it comes, the run stops with a checkpoint of where it stopped."""
    show = ProgressLine.show

    def late(self, steps, *rest):
        show(self, steps, *rest)
        if steps == 512 * 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ProgressLine, "show", late)
    result = lab.train(tmp_path, checkpoint_every=10**9)
    assert result["signal"] == signal.SIGTERM and steps_of(lab.name, tmp_path / "run") == result["steps"]


@mostly_shared
def test_a_run_takes_no_folder_with_other_files(lab, tmp_path):
    lab.train(tmp_path, total_timesteps=512)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tmp").write_text("mine")
    for name, message in (
        ("run", r"--resume .*run\), or give another --run-name"),
        ("thesis", "is not empty; give another --run-name"),
        ("..", "which is a path"),
        ("a/b", "which is a path"),
    ):
        with pytest.raises(ValueError, match=message):
            lab.train(tmp_path, run_name=name)
    assert (tmp_path / "thesis" / "chapter.tmp").read_text() == "mine"


@mostly_shared
def test_best_pt_is_the_better_driver_that_was_written(lab, tmp_path, monkeypatch):
    """What is announced is what best.pt holds, and a later driver is measured by that."""
    scores, now, write = iter([1.0, 3.0, 2.0, 0.0]), [None], checkpoints.write_checkpoint
    monkeypatch.setattr(run_module, "score", lambda episodes: now[0])
    real = Run._drive_episodes

    def evaluated(self):
        now[0] = next(scores)
        return real(self)

    def full(path, checkpoint):
        return write(path, checkpoint) if path.name != "best.pt" or now[0] != 3.0 else False

    monkeypatch.setattr(Run, "_drive_episodes", evaluated)
    monkeypatch.setattr(run_module, "write_checkpoint", full)
    result = lab.train(tmp_path, total_timesteps=2048, eval_every=512)
    assert result["best"]["score"] == 2.0 and result["best"]["step"] == 1536
    assert steps_of(lab.name, tmp_path / "run" / "best.pt") == 1536


@mostly_shared
def test_the_race_shows_the_best_driver_even_if_an_earlier_session_drove_it(lab, tmp_path, monkeypatch):
    lab.train(tmp_path, total_timesteps=512, pictures=True)
    before = (tmp_path / "run" / "lap-track-01.csv").read_text()
    monkeypatch.setattr(run_module, "score", lambda episodes: -1e9)
    lab.resume(tmp_path / "run", total_timesteps=1024)
    assert (tmp_path / "run" / "lap-track-01.csv").read_text() == before
    page = (tmp_path / "run" / "race.html").read_text(encoding="utf-8")
    assert '"latest evaluation"' in page and page.count('"note":"step 512"') == 1


@mostly_shared
def test_a_driver_without_a_lap_is_shown_and_pictures_can_be_left_out(lab, tmp_path):
    config = short_episodes(tmp_path, 60)
    run = Path(lab.train(tmp_path, total_timesteps=512, pictures=True, config_path=config)["run_folder"])
    names = {path.name for path in run.iterdir()}
    assert {"race.html", "racing_line.png", "replay.gif", "lap-track-01.csv"} <= names
    assert '"complete":false' in (run / "race.html").read_text(encoding="utf-8")
    run = Path(lab.train(tmp_path, total_timesteps=512, run_name="plain")["run_folder"])
    assert not list(run.glob("*.png")) and not (run / "race.html").exists()


@mostly_shared
def test_a_picture_that_cannot_be_drawn_costs_a_warning(lab, tmp_path, monkeypatch):
    lap = {"track_id": "no such track", "trajectory": torch.zeros(5, 7).numpy()}
    monkeypatch.setattr(Episode, "fastest", lambda self: lap)
    with pytest.warns(UserWarning, match="no picture of the best lap"):
        assert lab.train(tmp_path, total_timesteps=512, pictures=True)["finished"]


def test_a_checkpoint_without_a_new_flag_or_with_one_that_is_gone_resumes(lab, tmp_path, straight, capsys):
    shutil.copytree(straight, tmp_path / "run")
    for file in ("checkpoint.pt", "best.pt"):
        saved = torch.load(tmp_path / "run" / file, weights_only=True)
        del saved["args"]["max_grad_norm" if lab.name == "ppo" else "tau"]
        torch.save({**saved, "args": {**saved["args"], "warp_drive": True}}, tmp_path / "run" / file)
    assert lab.evaluate(tmp_path / "run")
    assert lab.resume(tmp_path / "run", total_timesteps=8704)["steps"] == 8704
    assert capsys.readouterr().err.count("warp_drive") == 2


def test_a_buffer_in_a_checkpoint_is_restored_though_the_next_ones_leave_it_out(tmp_path, capsys):
    lab = Lab("sac", tmp_path)
    lab.train(tmp_path, total_timesteps=2048, run_name="run")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    for folder, words in (("run", {"save_buffer": False}), ("other", {})):
        lab.resume(tmp_path / folder, total_timesteps=4096, **words)
    parts = [lab.load(tmp_path / folder)["parts"] for folder in ("run", "other")]
    assert_same(parts[0]["agent"], parts[1]["agent"])
    assert "buffer" not in parts[0] and "buffer" in parts[1] and "no buffer" not in capsys.readouterr().out


def test_without_its_buffer_sac_continues_and_says_what_that_means(tmp_path, capsys):
    lab = Lab("sac", tmp_path)
    lab.train(tmp_path, save_buffer=False, total_timesteps=2048)
    assert lab.resume(tmp_path / "run", total_timesteps=4096)["finished"]
    assert "no buffer" in capsys.readouterr().out


@mostly_shared
@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_kill_minus_9_and_resume_is_the_run_never_stopped(lab, start, tmp_path, straight, kills):
    """At random moments, each time somewhere in what is left of the run; then to the end."""
    rng, run = random.Random(kills), tmp_path / "run"
    for kill in range(kills):
        process = start(lab.name, **lab.settings(tmp_path)) if kill == 0 else start(lab.name, "--resume", run)
        if kill == 0:
            wait_for((run / "checkpoint.pt").exists, process)
        else:
            while not process.stdout.readline().startswith(str(tmp_path)):  # it has begun to drive
                assert process.poll() is None
        time.sleep(rng.uniform(0, 0.25))
        process.kill()
        process.communicate()
        lab.load(run)  # always a whole one
    process = start(lab.name, "--resume", run)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    lab.assert_same_run(straight, run)
    assert not list(run.glob("*.tmp")), "what a killed write left behind is tidied up"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals to send to another process")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)])
@mostly_shared
def test_signals_save_say_how_to_resume_and_exit_with_their_code(lab, start, tmp_path, number, code):
    process = start(lab.name, **lab.settings(tmp_path, total_timesteps=10**9))
    wait_for((tmp_path / "run" / "checkpoint.pt").exists, process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code, out
    assert f"--resume {tmp_path / 'run'}" in out and "Traceback" not in out
    steps = int(re.search(r"stopped: ([\d,]+) steps", out).group(1).replace(",", ""))
    assert steps_of(lab.name, tmp_path / "run") == steps, "saved where it stopped, not before"


# -- writing -----------------------------------------------------------------------------------------------------------


@mostly_shared
def test_a_full_disk_costs_a_warning_and_not_the_last_checkpoint(lab, tmp_path, monkeypatch, capsys):
    real, writes = os.fsync, []

    def full(descriptor):
        writes.append(1)
        if len(writes) > 2:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    result = lab.train(tmp_path)
    assert result["finished"] and not result["saved"]
    said = capsys.readouterr().err
    assert "No space left on device" in said and f"--resume {tmp_path / 'run'}" in said
    assert steps_of(lab.name, tmp_path / "run") == 2048 and not list((tmp_path / "run").glob("*.tmp"))


@mostly_shared
def test_a_disk_that_is_full_from_the_start_promises_no_checkpoint(lab, tmp_path, monkeypatch, capsys):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not lab.train(tmp_path, total_timesteps=1024)["saved"]
    said = capsys.readouterr().err
    assert "There is no checkpoint" in said and "--resume" not in said


@mostly_shared
def test_a_run_folder_that_cannot_be_made_is_an_error_at_once(lab, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="--run-dir"):
        lab.train(tmp_path / "file")


@mostly_shared
def test_the_run_folder_says_where_it_came_from(lab, straight):
    facts = json.loads((straight / "args.json").read_text())
    assert facts["args"]["num_envs"] == 16 and facts["versions"]["torch"] == torch.__version__
    assert set(facts) == {"args", "command", "commit", "versions", "processes"}


def test_the_commit_is_ours_not_that_of_a_repository_around_the_installation(tmp_path, monkeypatch):
    assert checkpoints.provenance()["commit"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "installed.py").touch()
    monkeypatch.setattr(checkpoints, "__file__", str(tmp_path / "installed.py"))
    assert checkpoints.provenance()["commit"] is None


# -- reading -----------------------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return (os.system, (f"{sys.executable} -c \"open('exploded', 'w')\"",))


BAD = {
    "missing": "does not exist",
    "truncated": "is not a valid checkpoint",
    "text": "is not a valid checkpoint",
    "empty": "is not a valid checkpoint",
    "pickle": "is not a valid checkpoint",
    "foreign": "not a checkpoint",
    "other": r"is a checkpoint of other_racer\.py, not of",
    "newer": "has format 99",
    "bare": "another version wrote it",
    "sizes": "does not fit this program",
    "lacking": "does not fit this program",
}


@mostly_shared
@pytest.mark.parametrize("make", BAD)
@pytest.mark.parametrize("use", ["resume", "evaluate"])
def test_a_bad_checkpoint_is_refused_and_says_why(lab, tmp_path, straight, make, use, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, good = tmp_path / "bad.pt", torch.load(straight / "checkpoint.pt", weights_only=True)
    (tmp_path / "args.json").touch()  # as in a run folder
    if make == "truncated":
        whole = (straight / "checkpoint.pt").read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif make in ("text", "empty"):
        path.write_text("hello" if make == "text" else "")
    elif make == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    elif make != "missing":
        changes = {"foreign": {}, "other": {**good, "algorithm": "other"}, "newer": {**good, "format": 99}}
        changes |= {"sizes": {**good, "args": {**good["args"], "hidden": 32}}}
        changes |= {"lacking": {**good, "parts": {**good["parts"], "agent": {}}}}
        changes |= {"bare": {"algorithm": lab.name, "format": 4}}
        torch.save(changes[make], path)
    with pytest.raises(ValueError, match=BAD[make]):
        lab.resume(path) if use == "resume" else lab.evaluate(path)
    assert not (tmp_path / "exploded").exists()


# -- on the real game --------------------------------------------------------------------------------------------------


@mostly_shared
def test_training_evaluating_and_resuming_on_a_bridge(lab, tmp_path, good_bridge, capsys):
    url = (good_bridge.url,)
    settings = {**lab.bridge, "bridge_url": url, "config_path": short_episodes(tmp_path, 60)}
    result = lab.train(tmp_path, **settings)
    assert result["finished"] and result["steps"] == 600
    assert lab.resume(tmp_path / "run", total_timesteps=800)["steps"] == 800
    (result,) = lab.evaluate(tmp_path / "run", episodes=2, bridge_url=url)
    assert result["mean_length"] == 60 and "0 of 2 episodes failed" in capsys.readouterr().out


@mostly_shared
def test_evaluation_costs_no_game_time_unless_the_game_drives_otherwise(lab, tmp_path, bridge, capsys):
    config, given = short_episodes(tmp_path, 60), {"total_timesteps": 100, "eval_every": 100}
    for name, words, said in (
        ("same", (), "; evaluated on the embedded engine"),
        ("other", ("--engine-force", "40000"), "; evaluated in the game, since "),
    ):
        server = bridge(*words)
        settings = {**lab.bridge, **given, "config_path": config, "bridge_url": (server.url,), "run_name": name}
        (result,) = lab.train(tmp_path, **settings)["best"]["results"]
        assert said in capsys.readouterr().out
        args = {"episodes": 1, "config_path": config}
        elsewhere = lab.evaluate(tmp_path / name, **args, **({"bridge_url": (server.url,)} if words else {}))[0]
        assert elsewhere["mean_reward"] == pytest.approx(result["mean_reward"], abs=1e-9)
        assert result["mean_length"] == 60


@mostly_shared
def test_a_run_that_began_on_the_engine_continues_in_the_game(lab, tmp_path, good_bridge):
    config = short_episodes(tmp_path, 60)
    lab.train(tmp_path, **{**lab.bridge, "total_timesteps": 200, "config_path": config})
    result = lab.resume(tmp_path / "run", total_timesteps=400, bridge_url=(good_bridge.url,))
    assert result["finished"] and result["steps"] == 400 and lab.load(tmp_path / "run")["parts"]["envs"] == [{}]


@mostly_shared
def test_a_run_that_began_in_the_game_can_continue_on_the_engine(lab, tmp_path, good_bridge):
    settings = {**lab.bridge, "bridge_url": (good_bridge.url,), "config_path": short_episodes(tmp_path, 60)}
    lab.train(tmp_path, **{**settings, "total_timesteps": 200})
    args = args_of(lab.name, "--resume", tmp_path / "run", "--total-timesteps", 400, "--bridge-url", "none")
    assert args.bridge_url == () and lab.module.train(args)["steps"] == 400
    assert lab.load(tmp_path / "run")["parts"]["envs"][0]


@mostly_shared
def test_a_fault_before_the_first_tick_leaves_nothing_and_is_retried(lab, tmp_path, good_bridge, monkeypatch):
    url = f"{good_bridge.url}/?fault=cut&after=30"
    settings = {**lab.bridge, "bridge_url": (url,), "config_path": short_episodes(tmp_path, 60)}
    folder = tmp_path / "runs"
    with pytest.raises(BridgeError, match="after 30 steps"):
        lab.train(folder, **settings)
    assert not folder.exists()
    tries, waits, sleep = [], [], time.sleep
    # Shorter ones are those of other threads.
    monkeypatch.setattr(time, "sleep", lambda s: waits.append(s) if s >= 1 else sleep(s))

    def flaky(*arguments):
        tries.append(1)
        if len(tries) < 3:
            raise BridgeError("gone")

    monkeypatch.setattr(run_module, "why_not_like_engine", flaky)
    args = args_of(lab.name, run_dir=folder, bridge_url=(good_bridge.url,), bridge_retries=2, **{
        **TINY_BRIDGE[lab.name], "total_timesteps": 100, "config_path": short_episodes(tmp_path, 60)})  # fmt: skip
    assert lab.module.train(args)["finished"] and len(tries) == 3 and waits == [1.0, 2.0]


@mostly_shared
def test_a_driver_drives_the_same_on_both_backends(lab, straight, good_bridge):
    agent = driver_of(straight)
    episodes, given = [], []
    for url in (None, good_bridge.url):
        envs = RacerVectorEnv(1, config_path=lab.usual["config_path"], bridge_url=url)
        given.append([])
        episodes.append(evaluate(lambda o: (given[-1].append(agent.drive(o)), given[-1][-1])[1], envs, ["track-01"]))
        envs.close()
    assert episodes[0] == episodes[1]
    assert_same(given[0], given[1])


@mostly_shared
def test_no_bridge_is_said_before_anything_is_made(lab, tmp_path):
    with pytest.raises(BridgeError, match="no game bridge at"):
        lab.train(tmp_path, **lab.bridge, bridge_url=("ws://127.0.0.1:9",))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lab", ["ppo"], indirect=True)
def test_random_tracks_are_what_args_say_and_the_file_s_config_is_what_is_compared(lab, tmp_path):
    config = short_episodes(tmp_path, 60)
    settings = lab.settings(tmp_path, random_tracks=2, off_road_penalty_scale=3.0, config_path=config, total_timesteps=512)
    args = lab.module.Args(**{**settings, "run_name": ""})
    assert args.tracks == ("any-1", "any-2")
    folder = Path(lab.module.train(args)["run_folder"])
    assert folder.name.startswith(f"{lab.name}-any-1-to-2-")
    text = config.read_text()
    config.write_text(text.replace("-0.001", "-0.005"))
    with pytest.raises(ValueError, match=r'"offTrackPenalty": -0\.001,'):
        lab.resume(folder, total_timesteps=1024)
    config.write_text(text)
    assert lab.resume(folder, total_timesteps=1024)["steps"] == 1024, "after pasting what the message shows"
    with pytest.raises(ValueError, match="--random-tracks and --track-id"):
        lab.module.Args(random_tracks=2, track_id=("track-02",))
    with pytest.raises(TypeError, match="slow_game"):
        lab.module.Args(slow_game=True)


def test_a_run_of_the_version_before_resumes_and_ends_as_it_would_have_there(lab, tmp_path):
    """Saved by commit 0c74df7 after 4 of 8 iterations; `agent.npz` is what that version reached in the end."""
    shutil.copytree(ROOT / "tests" / "golden" / "0c74df7" / lab.name, tmp_path / "run")
    assert lab.resume(tmp_path / "run", config_path=short_episodes(tmp_path, 300))["steps"] == 4096
    expected, agent = np.load(tmp_path / "run" / "agent.npz"), lab.load(tmp_path / "run")["parts"]["agent"]
    assert set(agent) == set(expected.files)
    for name, values in agent.items():  # other processors round otherwise
        np.testing.assert_allclose(values, expected[name], atol=1e-3, err_msg=name)
    assert lab.evaluate(tmp_path / "run")[0]["track"] == "track-01"


@mostly_shared
def test_random_tracks_and_rewards_of_an_earlier_version_stay_those(lab, tmp_path, straight):
    saved = torch.load(straight / "best.pt", weights_only=True)
    del saved["args"]["progress"]
    torch.save({**saved, "args": {**saved["args"], "random_tracks": 3}}, tmp_path / "old.pt")
    args = lab.load(tmp_path / "old.pt")["args"]
    assert args["progress"] == "centreline" and "random_tracks" not in args
    assert args["track_id"] == ["random-1", "random-2", "random-3"]
    assert lab.load(straight)["args"]["progress"] == "line"


@mostly_shared
def test_a_run_with_reward_terms_is_not_resumed_without_them(lab, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(REWARD_TERMS, "own", lambda observations, actions, info: 0.1 * observations[:, 9])
        lab.train(tmp_path, total_timesteps=512)
    with pytest.raises(ValueError, match="'own'"):
        lab.resume(tmp_path / "run", total_timesteps=1024)


@mostly_shared
def test_an_evaluation_is_compared_with_the_best_hand_written_setting_and_a_run_with_the_limit(lab, tmp_path, straight):
    config = lab.usual["config_path"]
    reward, *_ = hand_written_settings(["track-01"], config)["track-01"]
    lab.evaluate(straight, json=tmp_path / "out.json")
    (result,) = json.loads((tmp_path / "out.json").read_text())
    assert result["percent_of_hand_written"] == pytest.approx(100 * result["mean_reward"] / reward)
    assert lab.evaluate(straight, config_path=DEFAULT_CONFIG_PATH)[0]["track"] == "track-01"
    summary = json.loads((straight / "summary.json").read_text())
    assert {"percent_of_limit", "cutting"} <= set(summary["results"][0]) and summary["steps_per_sec"] > 0
