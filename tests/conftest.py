"""What several test files need: servers as processes of their own, simple drivers, small runs of both trainers."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ppo_racer
import sac_racer
from bench_racer import drive  # noqa: F401  the tests take it from here
from racer.evaluate import Args as EvaluateArgs
from racer.evaluate import run_evaluation
from racer.game.rules import DEFAULT_CONFIG
from racer.training.checkpoints import load_checkpoint, load_driver

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
MODULES = {"ppo": ppo_racer, "sac": sac_racer}
# Settings of small runs of each trainer: iterations of 512 steps with 16 cars, and no evaluation before the end.
TINY = {
    "ppo": {"action_repeat": 1, "rollout_steps": 32, "minibatch_size": 128, "update_epochs": 2},
    "sac": {"action_repeat": 4, "log_every": 512, "learning_starts": 512, "batch_size": 64, "updates": 2, "buffer_size": 1000},
}
for settings in TINY.values():
    settings |= {"num_envs": 16, "eval_every": 10**9, "checkpoint_every": 10**9, "tensorboard": False, "pictures": False}
# The same on a bridge: iterations of 100 steps with 2 cars.
TINY_BRIDGE = {
    "ppo": {"action_repeat": 1, "rollout_steps": 50, "minibatch_size": 50},
    "sac": {"log_every": 100, "learning_starts": 100, "batch_size": 16, "action_repeat": 2},
}
for settings in TINY_BRIDGE.values():
    settings |= {"num_envs": 2, "start": "grid", "eval_every": 10**9, "tensorboard": False, "pictures": False}
both = pytest.mark.parametrize("name", ["ppo", "sac"])
one_in_short = pytest.mark.parametrize("name", ["ppo", pytest.param("sac", marks=pytest.mark.slow)])


def flags(settings: dict) -> list[str]:
    """Settings as a command line."""
    words = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def args_of(name: str, *words, **settings):
    """The Args of a command line."""
    return MODULES[name].read_args(shlex.join([*map(str, words), *flags(settings)]))


def preset(name: str, flag: str) -> dict:
    """The defaults that a flag brings."""
    return next(preset.values for preset in MODULES[name].PRESETS if flag in preset.flag)


def driver_of(path: Path):
    """The trained agent in a checkpoint or run folder."""
    return load_driver(path).agent


def evaluate_run(path: Path, **settings) -> list[dict]:
    """python -m racer.evaluate"""
    return run_evaluation(EvaluateArgs(path, **{"episodes": 1, **settings}))


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """trained(name) -> a finished run of 1,024 steps on track-01 with short episodes. Read it only; copy it to change it."""
    runs = {}

    def run(name: str) -> Path:
        if name not in runs:
            folder = tmp_path_factory.mktemp("trained")
            settings = {**TINY[name], "config_path": short_episodes(folder, 300), "run_dir": folder, "run_name": name}
            MODULES[name].train(MODULES[name].Args(**settings, total_timesteps=1024))
            runs[name] = folder / name
        return runs[name]

    return run


def promised_tags(name: str) -> set[str]:
    """The TensorBoard tags that a run on one track writes, at least."""
    text = (TESTS / "golden" / "promised-tags.txt").read_text()
    lists = dict(re.findall(r"^(\w+):\n((?:.+/.+\n?)+)", text, re.M))
    return set(lists["both"].split()) | set(lists[name].split())


def resume(name: str, path: Path, **settings) -> dict:
    return MODULES[name].train(args_of(name, "--resume", path, **settings))


def load(name: str, path: Path) -> dict:
    return load_checkpoint(path, name)


def steps_of(name: str, path: Path) -> int:
    return load(name, path)["run"]["steps"]


def make_config(**changes) -> dict:
    """The default config with other values of some keys."""
    return {
        section: {key: changes.get(key, value) for key, value in defaults.items()}
        for section, defaults in DEFAULT_CONFIG.items()
    }


def short_episodes(folder: Path, ticks: int, **changes) -> Path:
    """A config file for shorter episodes, and so for shorter evaluations."""
    path = folder / f"short-{ticks}.json"
    path.write_text(json.dumps(make_config(maxSteps=ticks, **changes)))
    return path


def assert_same(a, b, path="it"):
    """Equal to the last bit, of the same kind, with the same keys: dicts, lists, arrays, tensors, numbers."""
    assert type(a) is type(b), (path, a, b)
    if isinstance(a, dict):
        assert set(a) == set(b), path
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)) or (isinstance(a, np.ndarray) and a.dtype.kind == "O"):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{i}]")
    elif hasattr(a, "dtype"):
        assert a.dtype == b.dtype, (path, a.dtype, b.dtype)
        np.testing.assert_array_equal(a, b, err_msg=path)
    else:
        assert a == b or (a != a and b != b), (path, a, b)


class Server:
    """A bridge server in its own process."""

    def __init__(self, *arguments: str, script: str = "bridge_server.py"):
        command = [sys.executable, str(TESTS / script), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        match = re.search(r"ws://\S+", line)
        assert match, f"the bridge server did not start: {line!r}"
        self.url = match.group()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def bridge():
    """bridge(*arguments) -> a running Server; all are killed after the test."""
    servers = []

    def start(*arguments: str, **named) -> Server:
        servers.append(Server(*arguments, **named))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def good_bridge():
    """One well-behaved server for the tests of a file that only drive."""
    server = Server()
    yield server
    server.kill()


@pytest.fixture
def start():
    """start(name, *words, script=None, **settings) -> a running trainer, killed after the test"""
    processes = []

    def start(name, *words, script=None, **settings):
        command = [sys.executable, str(script or ROOT / f"{name}_racer.py"), *map(str, words), *flags(settings)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        if os.name != "nt":  # where the tests run in the background, Ctrl+C is ignored
            pipes["preexec_fn"] = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        processes.append(subprocess.Popen(command, **pipes, text=True, env=environment))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for(condition, process, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
        time.sleep(0.02)


class Failing(io.StringIO):
    """A stdout or stderr that nothing can be written to."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


def hold_random_inputs(rng: np.random.Generator, ticks: int) -> np.ndarray:
    """Random inputs held for 5 to 30 ticks: full of wall hits. -> (ticks, 3)"""
    actions = []
    while len(actions) < ticks:
        action = [rng.uniform(-1, 1), rng.uniform(0, 1), rng.uniform(0, 1) * (rng.random() < 0.2)]
        actions += [action] * int(rng.integers(5, 31))
    return np.array(actions[:ticks])
