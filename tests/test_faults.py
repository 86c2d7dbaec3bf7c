"""What happens to long runs: full disks, kills in mid-write, bridges that fail and come back, replies that are rubbish, memory.

Each fault is tried with real processes or a real socket, for both trainers. (Kills at random moments, signals and bad
checkpoints: test_resume.py. Processes of a team that die: test_team.py.)
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import OWN, Server, both, one_in_short
from fuzz_server import expected, replies

import ppo_racer
import racer_env
import sac_racer
from callbacks_lite import Clock, RaceStats, read_csv
from racer_env import BridgeError, RacerVectorEnv

ROOT = Path(__file__).resolve().parent.parent
MODULES = {"ppo": ppo_racer, "sac": sac_racer}
SMALL = {"num-envs": 16, "eval-every": 4096, "checkpoint-every": 1024, "start": "anywhere", "run-name": "run"}
BRIDGE = {"num-envs": 2, "eval-every": 10**9, "checkpoint-every": 200, "run-name": "run"}
OWN_BRIDGE = {
    "ppo": {"rollout-steps": 50, "minibatch-size": 50},
    "sac": {"log-every": 100, "learning-starts": 100, "batch-size": 16, "action-repeat": 2},
}
OTHER_FAULTS = [
    pytest.param(f, marks=pytest.mark.slow) for f in ("stall", "close", "drip", "not-json", "nan-ray", "error")
]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses what only Linux has")


@pytest.fixture
def start(tmp_path):
    """start(name, script=None, **settings) -> a running trainer, killed after the test"""
    processes = []

    def start(name, script=None, ticks=300, **settings):
        command = [sys.executable, str(script or ROOT / f"{name}_racer.py")]
        config = tmp_path / "short.json"
        config.write_text((ROOT / "ai-config.json").read_text().replace("3000", str(ticks)))
        for flag, value in {"config-path": config, "run-dir": tmp_path, **settings}.items():
            flag = flag.replace("_", "-")
            if isinstance(value, bool):
                command.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                command += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


# -- disks and kills ---------------------------------------------------------------------------------------------------


# A trainer that dies, without a chance to tidy up, in its n-th step of writing a file.
DYING = """
import os, sys
import {name}_racer as trainer
steps = 0
def dying(real, half=False):
    def write(*arguments, **named):
        global steps
        steps += 1
        if steps == {at}:
            if half:
                os.truncate(arguments[0], os.fstat(arguments[0]).st_size // 2)
            os._exit(9)
        return real(*arguments, **named)
    return write
os.fsync, os.replace = dying(os.fsync, half=True), dying(os.replace)
sys.exit(trainer.main())
"""


@pytest.mark.parametrize("at", [8, *(pytest.param(i, marks=pytest.mark.slow) for i in range(9, 16))])
@one_in_short
def test_a_kill_in_mid_write_leaves_the_checkpoint_before_it(start, tmp_path, name, at):
    """At every stage of writing checkpoint.pt, best.pt and the replay buffer: half a file, a whole one not yet in place."""
    script = tmp_path / "dying.py"
    script.write_text(DYING.format(name=name, at=at))
    process = start(name, script, **SMALL, **OWN[name], total_timesteps=8192, tensorboard=False)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 9, out
    module, folder = MODULES[name], tmp_path / "run"
    steps = module.load_checkpoint(folder / "checkpoint.pt")["counters"]["steps"]
    assert steps in range(1024, 8192, 1024)
    result = module.train(module.Args(resume=folder))
    assert result["finished"] and result["steps"] == 8192
    assert not list(folder.glob("*.tmp")) and len(list(folder.glob("buffer-*"))) == (name == "sac")


@pytest.mark.slow
@linux
@both
def test_a_disk_that_fills_in_mid_run_stops_nothing_and_costs_no_checkpoint(start, tmp_path, name):
    """The system refuses all writing beyond a size: of checkpoints, metrics and TensorBoard's events alike."""
    import resource

    process = start(name, **SMALL, **OWN[name], total_timesteps=16_384)
    for line in process.stdout:
        if "track-01: " in line:  # the first evaluation: there are checkpoints by now
            break
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (500, 500))
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 1 and "\ndone: 16,384 steps" in out, out
    assert "the end of this run is not on the disk; make room, and go on from the last checkpoint: python " in out
    file = "checkpoint.pt" if name == "ppo" else r"buffer-\d+-\w+.npz"
    assert re.search(
        rf"{file} could not be written \(File too large\); the one before it is untouched. Make room", out
    ), out
    assert "Traceback" not in out
    folder = tmp_path / "run"
    checkpoint = MODULES[name].load_checkpoint(folder / "checkpoint.pt")
    assert 1024 <= checkpoint["counters"]["steps"] < 16_384
    assert not list(folder.glob("*.tmp"))
    result = MODULES[name].train(MODULES[name].Args(resume=folder))
    assert result["finished"], "and it goes on from there once there is room"


@pytest.mark.slow
@both
def test_a_folder_that_goes_away_in_mid_run_stops_nothing(start, tmp_path, name):
    process = start(name, **SMALL, **OWN[name], total_timesteps=16_384)
    for line in process.stdout:
        if "track-01: " in line:
            break
    with contextlib.suppress(PermissionError):  # Windows does not let go of open files: then nothing happens
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        (tmp_path / "run").write_text("in the way")
    out, _ = process.communicate(timeout=100)
    moved = (tmp_path / "elsewhere").exists()
    assert process.returncode == moved and ("the end of this run is not on the disk" in out) == moved, out
    assert "Traceback" not in out
    folder = tmp_path / ("elsewhere" if moved else "run")
    assert MODULES[name].load_checkpoint(folder / "checkpoint.pt")["counters"]["steps"] >= 1024


# -- bridges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["cut", *OTHER_FAULTS])
@one_in_short
def test_a_bridge_fault_in_mid_run_saves_and_exits_with_3(start, tmp_path, name, fault):
    script = tmp_path / "impatient.py"
    script.write_text(
        f"import sys, racer_env, {name}_racer as t\nracer_env.REPLY_TIMEOUT_S = 3.0\nsys.exit(t.main())\n"
    )
    server = Server("--fault", fault, "--after", "120")
    try:
        process = start(name, script, **BRIDGE, **OWN_BRIDGE[name], total_timesteps=2000, bridge_url=server.url)
        out, _ = process.communicate(timeout=100)
    finally:
        server.kill()
    assert process.returncode == 3 and "Traceback" not in out, out
    assert re.search(rf"bridge connection [01] \({server.url}\), after 12[01] steps: ", out), out
    assert f"--resume {tmp_path / 'run'}" in out
    assert MODULES[name].load_checkpoint(tmp_path / "run")["counters"]["steps"] in (200, 240)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", pytest.param("nan-ray", marks=pytest.mark.slow)])
@one_in_short
def test_with_retries_a_run_goes_on_through_faults_and_counts_them(start, tmp_path, name, fault):
    """Every connection fails after 120 steps: a run of 400 ticks meets that three times."""
    server = Server("--fault", fault, "--after", "120")
    try:
        settings = {**BRIDGE, **OWN_BRIDGE[name], "total-timesteps": 800, "bridge-url": server.url, "bridge-retries": 2}
        process = start(name, ticks=60, **settings)
        out, _ = process.communicate(timeout=100)
    finally:
        server.kill()
    assert process.returncode == 0 and out.count("Connecting again (retry 1 of 2)") == 3, out
    rows = read_csv(tmp_path / "run" / "metrics.csv")
    faults = [float(row["racer/bridge_faults"]) for row in rows]
    assert faults == sorted(faults) and faults[0] == 0 and faults[-1] == 3
    assert sum(float(row["racer/episodes_this_rollout"] or 0) for row in rows) >= 3 * 2, "cut episodes count"
    assert rows[-1]["step"] == "800"
    assert MODULES[name].load_checkpoint(tmp_path / "run")["counters"]["bridge_faults"] == 3


@pytest.mark.slow
@both
def test_retries_end_when_the_bridge_does_not_come_back(start, tmp_path, name):
    server = Server("--fault", "die", "--after", "120")
    process = start(name, **BRIDGE, **OWN_BRIDGE[name], total_timesteps=2000, bridge_url=server.url, bridge_retries=2)
    out, _ = process.communicate(timeout=100)
    server.kill()
    assert process.returncode == 3, out
    assert "Connecting again (retry 1 of 2)" in out and "(retry 2 of 2)" in out and "(retry 3" not in out
    assert "no game bridge at" in out and f"--resume {tmp_path / 'run'}" in out


class Faulty:
    """An environment whose step fails at certain ticks, before anything has happened."""

    def __init__(self, num_envs: int, faults: set[int]):
        self.envs, self.faults, self.calls, self.num_envs = RacerVectorEnv(num_envs), faults, 0, num_envs

    def reset(self):
        return self.envs.reset(seed=1)

    def step(self, actions):
        self.calls += 1
        if self.calls in self.faults:
            raise BridgeError("gone")
        return self.envs.step(actions)


@pytest.mark.parametrize("fault", [1, 2, 7, 20])
def test_no_update_of_ppo_uses_an_invented_step(fault):
    """Whatever tick fails: every stored step was driven, and ends, as truncated, where the next one does not follow."""
    envs = Faulty(3, {fault, fault + 1})
    torch.manual_seed(0)
    agent, storage, stats = ppo_racer.Agent(), ppo_racer.Storage(20, 3), RaceStats(3, 3000)
    obs, _ = envs.reset()
    storage.obs[-1] = torch.from_numpy(obs)
    recovered = []

    def recover(error):
        recovered.append(str(error))
        return envs.reset()[0]

    ppo_racer.rollout(agent, envs, storage, stats, torch.Generator().manual_seed(0), Clock(), recover)
    assert recovered == ["gone", "gone"] and envs.calls == 22 and stats.steps == 60
    at = fault - 1  # the tick that was driven anew
    assert storage.truncated.any(1).tolist() == [t == at - 1 for t in range(20)]
    assert not storage.terminated.any()
    twin, grid = RacerVectorEnv(3), torch.from_numpy(RacerVectorEnv(3).reset(seed=1)[0])
    ends = {t: torch.from_numpy(last) for t, cars, last in storage.final_obs if len(cars)}
    assert set(ends) == ({at - 1} if at else set())
    for begin, end in ((0, at), (at, 20)):
        obs = torch.from_numpy(twin.reset(seed=1)[0])
        assert begin == end or torch.equal(storage.obs[begin], grid)
        for t in range(begin, end):
            assert torch.equal(storage.obs[t], obs)
            following, rewards, *_ = twin.step(storage.actions[t].numpy())
            obs = torch.from_numpy(following)
            np.testing.assert_array_equal(storage.rewards[t], rewards)
        if end == at and at:
            assert torch.equal(ends[at - 1], obs), "what the cut episode is valued by: its true last observation"


def test_no_update_of_sac_uses_an_invented_step(tmp_path, monkeypatch):
    """A choice whose answer was lost is not in the buffer, and the one before it does not lead into the next."""
    args = sac_racer.Args(
        num_envs=2, run_dir=tmp_path, bridge_retries=1, learning_starts=10**6, n_step=3, buffer_size=100
    )
    monkeypatch.setattr(sac_racer, "LONGEST_PAUSE_S", 0)
    run = sac_racer.Run(args, sac_racer.Team(), sac_racer.Stop())
    run.begin()
    real, calls = run.envs.step, []

    def step(actions):
        calls.append(1)
        if len(calls) == 4 * 6 + 3:  # in the midst of the seventh choice
            raise BridgeError("gone")
        return real(actions)

    def reconnect():
        obs, infos = run.envs.reset()
        under_way = np.ones(2, bool)
        return obs, {
            **infos,
            "_episode": under_way,
            "episode": {"r": np.ones(2), "l": np.full(2, 26), "cut": under_way},
        }

    monkeypatch.setattr(run.envs, "step", step)
    monkeypatch.setattr(run.envs, "reconnect", reconnect)
    for _ in range(10):
        sac_racer.drive_and_learn(run)
    run.close()
    buffer = run.buffer
    assert buffer.filled == 10 and run.steps == 80 and run.bridge_faults == 1 and run.stats.ended == 2
    follows = (buffer.obs[1:10] == buffer.next_obs[:9]).all(-1)
    assert follows.all(1).tolist() == [t != 5 for t in range(9)]
    assert buffer.ended[:10].all(1).tolist() == [t == 5 for t in range(10)]
    assert (buffer.discounts[5] > 0).all(), "truncated: what follows is valued"
    assert torch.equal(buffer.obs[6], torch.from_numpy(RacerVectorEnv(2).reset()[0])), "the next one begins on the grid"


# -- rubbish -----------------------------------------------------------------------------------------------------------


class Fuzzed:
    """A fuzzing server in its own process."""

    def __init__(self, seed: int):
        command = [sys.executable, str(Path(__file__).with_name("fuzz_server.py")), str(seed)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.mark.parametrize("count", [1500, pytest.param(50_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_malformed_replies_are_always_an_error_and_no_wrong_number_is_accepted(count, monkeypatch):
    """The server answers the n-th connection's step with the n-th malformed reply, which this test makes too."""
    monkeypatch.setattr(racer_env, "REPLY_TIMEOUT_S", 20.0)
    server = Fuzzed(seed=count)
    accepted = refused = 0
    try:
        for data, closes in replies(seed=count, count=count):
            connection = racer_env.BridgeConnection(server.url)
            connection.send_step(np.array([0.0, 1.0, 0.0]))
            wanted = expected(data) if closes is None else None
            try:
                observation, reward, terminated, truncated, info = connection.receive_step()
            except BridgeError as error:
                assert wanted is None, (data, error)
                assert str(error).startswith(f"bridge connection 0 ({server.url}), after 0 steps: ")
                refused += 1
            else:
                assert wanted is not None, data
                assert (observation.tolist(), reward, terminated, truncated, info) == wanted, data
                accepted += 1
            connection.close()
    finally:
        server.kill()
    assert refused + accepted == count and refused > count * 0.8 and accepted > count * 0.01


# -- hours -------------------------------------------------------------------------------------------------------------


@linux
@pytest.mark.slow
@pytest.mark.timeout(600)
@both
def test_memory_stays_flat(tmp_path, monkeypatch, name):
    """As many iterations, rows, evaluations and checkpoints as in an hour of training, on a small scale."""
    module = MODULES[name]
    config = tmp_path / "short.json"
    config.write_text((ROOT / "ai-config.json").read_text().replace("3000", "60"))
    sizes = []
    real = module.learn_once

    def learn_once(run):
        sizes.append(int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)))
        return real(run)

    monkeypatch.setattr(module, "learn_once", learn_once)
    small = {"rollout_steps": 16, "minibatch_size": 128} if name == "ppo" else {"log_every": 256, "action_repeat": 2}
    small |= {} if name == "ppo" else {"learning_starts": 256, "batch_size": 16, "updates": 2, "buffer_size": 320}
    args = module.Args(
        num_envs=16, total_timesteps=256 * 2000, config_path=config, run_dir=tmp_path,
        eval_every=256 * 20, checkpoint_every=256 * 20, **small,
    )  # fmt: skip
    module.train(args)
    tenth = len(sizes) // 10
    first, last = np.mean(sizes[:tenth]), np.mean(sizes[-tenth:])
    assert tenth == 200 and last < 1.05 * first, (first, last)
