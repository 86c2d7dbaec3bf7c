"""What several test files need: servers as processes of their own, and simple drivers."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parent
# Settings of small runs of each trainer: iterations of 512 steps with 16 cars, and no evaluation before the end.
TINY = {
    "ppo": {"rollout_steps": 32, "minibatch_size": 128},
    "sac": {"log_every": 512, "learning_starts": 512, "batch_size": 64, "updates": 2, "buffer_size": 1000},
}
for settings in TINY.values():
    settings |= {"num_envs": 16, "eval_every": 10**9, "checkpoint_every": 10**9, "tensorboard": False}
both = pytest.mark.parametrize("name", ["ppo", "sac"])
one_in_short = pytest.mark.parametrize("name", ["ppo", pytest.param("sac", marks=pytest.mark.slow)])


class Server:
    """A bridge server in its own process."""

    def __init__(self, *arguments: str):
        command = [sys.executable, str(TESTS / "bridge_server.py"), *arguments]
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

    def start(*arguments: str) -> Server:
        servers.append(Server(*arguments))
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


class Failing(io.StringIO):
    """A stdout or stderr that nothing can be written to."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


def drive(observations: np.ndarray) -> np.ndarray:
    """A simple driver on (N, 14) observations: steers to the longer side, slows for what is near ahead. -> (N, 3)"""
    ahead, speed = observations[:, 4], observations[:, 9] * 160
    turn = observations[:, 6] - observations[:, 2] + 0.7 * (observations[:, 5] - observations[:, 3])
    wanted = 25 + 100 * ahead
    return np.stack([np.clip(-3 * turn, -1, 1), speed < wanted, speed > wanted + 10], axis=1).astype(np.float64)


def hold_random_inputs(rng: np.random.Generator, ticks: int) -> np.ndarray:
    """Random inputs held for 5 to 30 ticks: full of wall hits. -> (ticks, 3)"""
    actions = []
    while len(actions) < ticks:
        action = [rng.uniform(-1, 1), rng.uniform(0, 1), rng.uniform(0, 1) * (rng.random() < 0.2)]
        actions += [action] * int(rng.integers(5, 31))
    return np.array(actions[:ticks])
