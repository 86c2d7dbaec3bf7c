"""Experiments: the statistics on made-up distributions, and commands that are frozen, run in parallel, resumed and judged."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, TINY, flags, short_episodes, wait_for

from racer import experiment
from racer.experiment import Args, holds_from, plan, run_experiment, table
from racer.statistics import RESAMPLES, difference_of_means, probability_of_improvement, resample, student_t, verdict

# -- statistics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, 8, 16])
def test_the_interval_holds_the_true_difference_in_about_95_of_100_experiments(count, monkeypatch):
    """And one that is not widened for few values holds it too rarely."""
    monkeypatch.setattr("racer.statistics.RESAMPLES", 1000)
    rng, held, plain_held, times = np.random.default_rng(0), 0, 0, 600
    for _ in range(times):
        a, b = rng.normal(7.0, 0.05, count), rng.normal(7.1, 0.1, count)
        _, low, high = difference_of_means(a, b)
        held += low <= 0.1 <= high
        draws = [v[rng.integers(count, size=(1000, count))].mean(1) for v in (a, b)]
        low, high = np.percentile(draws[1] - draws[0], [2.5, 97.5])
        plain_held += low <= 0.1 <= high
    assert 0.92 <= held / times <= 0.98
    assert count > 4 or plain_held / times < 0.90, "the wrong variant fails"
    assert student_t(6) == pytest.approx(2.447, abs=0.02) and student_t(30) == pytest.approx(2.042, abs=0.002)


def test_a_resampled_mean_varies_as_much_as_a_mean_does():
    values = np.random.default_rng(1).normal(size=10)
    assert resample(values, np.random.default_rng(0)).std() == pytest.approx(values.std(ddof=1) / math.sqrt(10), rel=0.03)
    assert len(resample(values, np.random.default_rng(0))) == RESAMPLES


def test_the_probability_of_improvement_by_hand_and_of_two_normals():
    assert probability_of_improvement([1, 2], [2, 3]) == (3 + 0.5) / 4 and probability_of_improvement([1.0], [1.0]) == 0.5
    rng = np.random.default_rng(0)
    found = probability_of_improvement(rng.normal(0, 1, 2000), rng.normal(1, 1, 2000))
    assert found == pytest.approx(0.5 * (1 + math.erf(0.5)), abs=0.015)


def test_verdicts_say_what_is_known():
    a = np.array([7.40, 7.42, 7.44, 7.41, 7.43, 7.42, 7.40, 7.45])
    assert verdict(a, a + 0.1).startswith("better: +0.100 (+0.0") and verdict(a, a - 0.1).startswith("worse: -0.100")
    same = verdict(a, a[::-1].copy())
    assert same.startswith("no difference found in 8 seeds (-0.0") and "; 32 would show one of 0.01" in same
    assert "more --seeds" in verdict([7.0], [7.1])


def test_a_lap_time_holds_from_the_evaluation_after_which_it_is_never_lost_again():
    evaluations = [(1, 0.1, 0.0, 6.0), (2, 0.2, 0.0, 8.0), (3, 0.3, 0.0, 7.0), (4, 0.4, 0.0, 6.9)]
    assert holds_from(evaluations) == 3 and holds_from([*evaluations, (5, 0.5, 0.0, None)]) == math.inf


# -- experiments -------------------------------------------------------------------------------------------------------


def small(folder, **changes) -> str:
    """A command of a second or two."""
    settings = {**TINY["ppo"], "config_path": short_episodes(folder, 300), "total_timesteps": 2048, **changes}
    return " ".join(["ppo_racer.py", *flags(settings)])


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished experiment: a learning rate of 0 beside one that learns."""
    folder = tmp_path_factory.mktemp("experiment")
    args = Args((small(folder), small(folder, learning_rate=0.0)), (1, 2), out=folder / "out", jobs=2)
    return args, run_experiment(args)


def test_every_command_runs_with_every_seed_and_is_shown(done, capsys):
    args, found = done
    assert [[run["seed"] for run in command["runs"]] for command in found["commands"]] == [[1, 2], [1, 2]]
    assert [len(row) for row in table(found)] == [len(experiment.COLUMNS)] * 2
    names = {path.name for path in args.out.iterdir()}
    assert names >= {"experiment.html", "race.html", "curves.png", "results.csv", "experiment.json", "code", "runs"}
    page = (args.out / "experiment.html").read_text(encoding="utf-8")
    assert "/* DATA */" not in page and args.commands[1].split()[-1] in page
    rows = (args.out / "results.csv").read_text().splitlines()
    assert len(rows) == 5 and rows[0].startswith("command,seed,steps,seconds,track")
    again = run_experiment(Args(out=args.out, markdown=True))
    shown = capsys.readouterr().out
    assert again == found and shown.count("| track-01 |") == 2 and "of 4 runs" not in shown, "shown again, not run again"


@pytest.mark.slow
def test_the_page_of_an_experiment_draws(done):
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not chromium:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab, said, seen = browser.new_page(), [], set()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto((done[0].out / "experiment.html").as_uri())
        for what in ("training 2", "evaluations 2"):
            for axis in "01":
                tab.select_option("#what", what)
                tab.select_option("#axis", axis)
                seen.add(tab.evaluate("$('chart').toDataURL()"))
        assert len(seen) == 4 and not said and tab.locator("#table tr").count() == 5
        browser.close()


def test_the_code_is_frozen(done, monkeypatch):
    args, _ = done
    assert (args.out / "code" / "now" / "racer" / "game" / "sim.py").exists()
    job = experiment.jobs_of(*plan(args))[0]
    assert job.code == (args.out / "code" / "now").resolve() and job.summary["finished"]
    real = experiment.code_files
    monkeypatch.setattr(experiment, "code_files", lambda entries: real(entries)[1:])  # as if a file had changed
    with pytest.raises(ValueError, match="the code has changed since"):
        plan(args)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="it has other commands"):
        plan(Args(args.commands[:1], args.seeds, out=args.out))


def test_bad_input_is_one_line(tmp_path):
    (tmp_path / "notes.py").write_text("print(1)")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    for args, message in (
        (Args(("ppo_racer.py",), (4, 1)), "--seeds is 4 1"),
        (Args(("ppo_racer.py",), jobs=0), "--jobs 0"),
        (Args((str(tmp_path / "notes.py"),)), "is not a trainer"),
        (Args(("nothing.py",)), "is not a trainer"),
        (Args(out=tmp_path / "none"), "is not an experiment"),
        (Args(("ppo_racer.py",), out=tmp_path / "full"), "has other files"),
        (Args(("ppo_racer.py",), against="no-such-ref", out=tmp_path / "new"), "--against is 'no-such-ref'"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(args)
    assert not (tmp_path / "new").exists()


def test_a_run_that_fails_is_shown_and_ends_no_other(tmp_path, capsys):
    args = Args((small(tmp_path), "ppo_racer.py --gamma 7"), (1, 1), out=tmp_path / "out", jobs=2)
    with pytest.raises(ValueError, match="1 runs failed"):
        run_experiment(args)
    said = capsys.readouterr().out
    assert "FAILED: ppo_racer.py --gamma 7 --seed 1" in said and "--gamma is 7.0" in said
    assert "--gamma 7: no finished runs" in said
    found = json.loads((tmp_path / "out" / "experiment.json").read_text())
    assert [len(command["runs"]) for command in found["commands"]] == [1, 0]


@pytest.mark.slow
def test_my_edit_is_compared_with_a_commit(tmp_path):
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("needs the repository")
    found = run_experiment(Args((small(tmp_path),), (1, 2), against="HEAD", out=tmp_path / "out", jobs=2))
    before, now = found["commands"]
    assert before["command"].endswith("@ HEAD") and len(before["runs"]) == len(now["runs"]) == 2
    assert [run["results"] for run in before["runs"]] == [run["results"] for run in now["runs"]], "the same code, the same runs"


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="kills processes")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_experiment_that_is_stopped_continues_and_ends_the_same(tmp_path, how):
    """Three times, each as soon as one of its runs has written another checkpoint."""
    command = small(tmp_path, total_timesteps=30_720, checkpoint_every=1024)
    whole = run_experiment(Args((command,), (1, 3), out=tmp_path / "whole", jobs=2))
    out = tmp_path / "out"
    line = [sys.executable, "-m", "racer.experiment", command, *["--seeds", "1", "3", "--jobs", "2", "--out"], str(out)]

    def written() -> set:
        return {(path, path.stat().st_mtime_ns) for path in out.glob("runs/0/*/checkpoint.pt")}

    for _ in range(3):
        before = written()
        process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        wait_for(lambda before=before: written() - before, process)
        process.send_signal(how)
        process.communicate()
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "experiment.json").read_text())
    assert [run["results"] for run in found["commands"][0]["runs"]] == [run["results"] for run in whole["commands"][0]["runs"]]
    starts = [path.read_text().count(f"{path.stem}: 16 cars") for path in out.glob("runs/0/*.log")]
    resumed = [path.read_text().count("resuming from step") for path in out.glob("runs/0/*.log")]
    assert sum(starts) - sum(resumed) == 3, "none is trained from the start twice"
    assert how == signal.SIGKILL or sum(resumed) >= 1


# -- Stable-Baselines3 -------------------------------------------------------------------------------------------------


def test_sb3_trains_on_the_batched_engine_and_a_peer_leaves_a_run_folder(tmp_path, monkeypatch):
    pytest.importorskip("stable_baselines3")
    from stable_baselines3 import PPO
    from stable_baselines3.common.evaluation import evaluate_policy

    from racer import sb3

    model = PPO("MlpPolicy", sb3.make_vec_env(4, seed=1), n_steps=16, batch_size=32, device="cpu").learn(64)
    config = json.loads(short_episodes(tmp_path, 50).read_text())
    rewards, lengths = evaluate_policy(model, sb3.make_vec_env(2, config_path=config), 2, return_episode_rewards=True)
    assert len(rewards) == 2 and lengths == [50, 50], "truncated episodes have their true length"
    monkeypatch.setattr(sb3, "PEERS", {"small": ("PPO", 256, 2, {"n_steps": 64, "gamma": 0.98})})
    summary = sb3.train_peer(sb3.Args("small", run_dir=tmp_path, run_name="peer"))
    assert summary["finished"] and summary["results"][0]["track"] == "track-01"
    curves = experiment.curves_of(tmp_path / "peer" / "metrics.csv")
    assert len(curves["evaluations"]) == 2 and json.loads((tmp_path / "peer" / "summary.json").read_text())["steps"] == 256


def test_a_peer_is_started_with_the_frozen_code(tmp_path):
    """Without the package it says what is missing; its flags are read all the same."""
    entry = experiment.entries_of("sb3 no such peer", "")[0]
    job = experiment.Job(0, entry, 1, tmp_path / "runs", ROOT)
    assert job.start().wait(60) == 2 and "unknown peer 'no such peer'" in job.log.read_text()


def test_without_stable_baselines3_it_says_what_to_install(monkeypatch):
    from racer import sb3

    monkeypatch.setattr(sb3, "stable_baselines3", None)
    with pytest.raises(ValueError, match="pip install stable-baselines3"):
        sb3.make_vec_env(1)
