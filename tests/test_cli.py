"""The commands as a user types them, in processes of their own; and that the files around the code say what is true."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MODULES, ROOT, args_of, both, preset

import sac_racer
from racer.game.checks import UserError
from racer.game.config import DEFAULT_CONFIG_PATH
from racer.game.tracks import TRACKS
from racer.training.run import Run

COMMANDS = ["bench_racer.py", "ppo_racer.py", "sac_racer.py"]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_reads(command):
    shown = run(command, "--help")
    assert shown.returncode == 0 and command in shown.stdout


@pytest.mark.parametrize("words", [("--num-envs", "0"), ("--num-envs", "many"), ("--seed", "-1"), ("--no-such-flag", "")])
def test_a_value_that_makes_no_sense_is_named_without_a_traceback(monkeypatch, capsys, tmp_path, words):
    monkeypatch.setattr(sys, "argv", ["ppo_racer.py", *words, "--run-dir", str(tmp_path)])
    try:
        code = MODULES["ppo"].main()
    except SystemExit as error:
        code = error.code
    said = "".join(capsys.readouterr())
    assert code == 2 and words[0].strip("-") in said and words[1] in said


@both
def test_help_tells_every_flag_with_the_defaults_of_this_command_line_on_two_screens(name, capsys, monkeypatch):
    module = MODULES[name]
    monkeypatch.setenv("COLUMNS", "120")

    def shown(*words):
        with pytest.raises(SystemExit) as end:
            args_of(name, *words, "--help")
        assert end.value.code == 0, "and a notebook continues"
        return capsys.readouterr().out

    usual = shown()
    assert len(usual.splitlines()) <= 140 and usual.splitlines()[2].startswith(name.upper())
    for field in dataclasses.fields(module.Args):
        assert f"--{field.name.replace('_', '-')}" in usual
    for group in ("run", "env", "algorithm", "optimisation", "logging-and-checkpoints"):
        assert f" {group} options " in usual
    for preset_ in module.PRESETS:
        assert preset_.flag in usual
    slow = preset(name, "--slow-game")["num_envs"]
    for cars, text in ((module.Args().num_envs, usual), (slow, shown("--bridge-url", "ws://localhost:1"))):
        assert re.search(r"--num-envs N[^(]*\(default:\s+(\d+)\)", text)[1] == str(cars)


@both
def test_counts_may_be_written_as_people_write_them(name):
    for text in ("2000000", "2_000_000", "2e6"):
        assert args_of(name, "--total-timesteps", text).total_timesteps == 2_000_000
        assert args_of(name, f"--total-timesteps={text}").total_timesteps == 2_000_000
    for text in ("0", "-5", "1.5", "1e-3"):
        with pytest.raises(SystemExit):
            args_of(name, "--total-timesteps", text)


@both
def test_some_flags_choose_the_defaults_of_others(name):
    module = MODULES[name]
    usual, bridge = args_of(name), args_of(name, "--bridge-url", "ws://localhost:1")
    assert usual == module.Args()
    slow = preset(name, "--slow-game")
    assert dataclasses.replace(usual, **slow) == dataclasses.replace(bridge, bridge_url=())
    for word in ("--slow-game", "--slow_game"):
        assert args_of(name, word) == dataclasses.replace(usual, **slow)
    assert args_of(name, "--slow-game", "--seed", "3").seed == 3
    several = args_of(name, "--track-id", "track-01", "track-02")
    assert several == dataclasses.replace(usual, track_id=("track-01", "track-02"), **preset(name, "--track-id"))
    assert args_of(name, "--track-id", "track-01", "track-02", "--start", "grid").start == "grid"
    on_bridge = args_of(name, "--track-id", "track-01", "track-02", "--bridge-url", "ws://localhost:1")
    assert on_bridge.start == "grid" and on_bridge.num_envs == slow["num_envs"], "the real game has no other start"
    every = args_of("ppo", "--random-tracks", "3")
    assert every.tracks == ("any-1", "any-2", "any-3") and every.hide_arc and every.start == "anywhere"
    assert every.off_road_penalty_scale == preset("ppo", "--random-tracks")["off_road_penalty_scale"] > 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--evaluate", "runs/a"), "python -m racer.evaluate runs/a"),
        (("--evaluate=runs/a b",), "python -m racer.evaluate 'runs/a b'"),
        (("--export", "--game", "G", "--checkpoint", "runs/a"), "python -m racer.export runs/a --game G"),
        (("--export", "out", "--checkpoint", "runs/a"), "python -m racer.export runs/a --out out"),
        (("--start-from", "a", "--resume", "b"), "--start-from is for a new run; leave it out with --resume"),
        (("--slow-game", "--resume", "a"), "--slow-game .* --resume"),
        (("--random-tracks", "2", "--track-id", "track-02"), "--random-tracks and --track-id are mutually exclusive"),
        (("--bridge-url",), "--bridge-url has no URL; give one like ws://localhost:9876"),
    ],
)
def test_flags_that_make_no_sense_together_or_alone_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        args_of("ppo", *words)


def test_a_buffer_has_to_hold_the_steps_that_are_learned_from():
    with pytest.raises(ValueError, match="--buffer-size is 100, less than 64 cars times --n-step 5"):
        sac_racer.Args(buffer_size=100)


def test_every_track_needs_a_car(tmp_path):
    with pytest.raises(ValueError, match=r"--num-envs is 2; .* a car on every track \(3\)"):
        Run("ppo", args_of("ppo", "--track-id", *TRACKS, "--num-envs", 2, "--minibatch-size", 8)).__enter__()


def test_a_terminal_without_a_letter_ends_nothing(tmp_path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "ppo_racer.py", "--resume", str(tmp_path / "\u00fcn\u00ef")]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, env=environment)
    assert refused.returncode == 2 and "?n? does not exist" in refused.stderr


def test_an_unknown_track_is_an_error_not_a_traceback():
    refused = run("bench_racer.py", "--track-id", "nope")
    assert refused.returncode not in (0, 1)
    assert "unknown track 'nope'. Available: track-01" in refused.stderr and "Traceback" not in refused.stderr


def test_every_requirement_has_both_bounds_and_a_reason():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) >= 7
    for line in lines:
        assert re.fullmatch(r"[\w-]+>=[\d.]+,<[\d.]+ +# .{8,}", line), line
    assert any(line.startswith("torch>=2.4,<2.14 ") for line in lines)


def test_what_pip_installs_is_what_the_requirements_name_and_every_module():
    project = (ROOT / "pyproject.toml").read_text()
    to_run = (ROOT / "requirements.txt").read_text().split("# -- to test")[0]
    assert re.findall(r'^    "(\S+>=\S+)",$', project, re.M) == re.findall(r"^(\w\S+)", to_run, re.M)
    modules = re.search(r"py-modules = \[(.*?)\]", project, re.S)[1]
    assert sorted(re.findall(r'"(\w+)"', modules)) == sorted(path.stem for path in ROOT.glob("*.py"))


def test_the_engine_needs_numpy_only():
    blocked = "import sys; sys.modules.update(dict.fromkeys(['gymnasium', 'websocket', 'torch', 'PIL', 'tyro']))\n"
    result = run("-c", blocked + "from racer.game.sim import RacerSim; print(RacerSim(2).reset().shape)")
    assert result.returncode == 0 and "(2, 14)" in result.stdout, result.stderr


def test_commands_in_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    for file in re.findall(r"python ((?:\w+/)?\w+\.py)", text):
        assert (ROOT / file).exists(), file
    assert re.search(r"^pip install -r requirements.txt && pytest$", text, re.M)


BAD_VALUES = [
    ("gamma", 1.5),
    ("seed", -1),
    ("init_std", 0.0),
    ("stuck_ticks", -3),
    ("learning_rate", -1e-3),
    ("num_envs", 0),
    ("learning_rate", float("inf")),
]
BAD_VALUES = [(name, *bad) for name in ("ppo", "sac") for bad in BAD_VALUES]
BAD_VALUES += [
    ("ppo", "random_tracks", -3),
    ("ppo", "clip_coef", -0.2),
    ("ppo", "gae_lambda", 2.0),
    ("sac", "tau", 1.5),
    ("sac", "noise_memory", 1.0),
    ("sac", "init_std", 3.0),
    ("sac", "target_entropy", float("nan")),
    ("sac", "buffer_size", 10**12),
    ("ppo", "num_envs", 10**12),
    ("ppo", "hidden", 10**7),
    ("ppo", "rollout_steps", 10**12),
    ("ppo", "random_tracks", 10**8),
]


@pytest.mark.parametrize(("name", "setting", "value"), BAD_VALUES)
def test_values_that_cannot_work_are_refused_at_the_start_from_python_too(name, setting, value):
    flag = f"--{setting.replace('_', '-')}"
    with pytest.raises(ValueError, match=f"{flag} is {value}; it must be "):
        MODULES[name].Args(**{setting: value})
    with pytest.raises((UserError, SystemExit)):
        args_of(name, flag, value)


def test_args_made_in_python_take_plain_values_and_name_the_wrong_ones():
    args = MODULES["ppo"].Args(track_id="track-02", run_dir="somewhere", config_path=str(DEFAULT_CONFIG_PATH), hidden=8.0)
    assert args.tracks == ("track-02",) and args.run_dir == Path("somewhere") and args.config_path == DEFAULT_CONFIG_PATH
    for name, value in (
        ("gamma", "0.9"),
        ("num_envs", 1.5),
        ("num_envs", True),
        ("seed", None),
        ("random_tracks", "3"),
    ):
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is {value!r}"):
            MODULES["ppo"].Args(**{name: value})


@pytest.mark.skipif(os.name != "posix", reason="another shell's rules")
def test_a_command_line_as_text_is_read_like_in_a_shell():
    args = MODULES["ppo"].read_args("--run-dir 'a b' --track-id track-01 mine.json")
    assert args.run_dir == Path("a b") and args.track_id == ("track-01", "mine.json")
    with pytest.raises(ValueError, match="is not a command line"):
        MODULES["ppo"].read_args("--run-name 'a")
    with pytest.raises(ValueError, match="--track-id"):
        MODULES["ppo"].Args(track_id=None)


@pytest.mark.parametrize("words", [("--random-tracks", "abc"), ("--resume",)])
def test_a_flag_without_its_value_is_named(words, capsys):
    with pytest.raises(SystemExit) as end:
        args_of("ppo", *words)
    assert end.value.code == 2 and words[0] in "".join(capsys.readouterr())
