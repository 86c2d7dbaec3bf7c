"""What happens to long runs: full disks, kills in the middle of a write, bridges that fail and come back, rubbish, memory.

Each fault is tried with real processes or a real socket. (Kills at random moments, signals and bad checkpoints:
test_resume.py. Processes that die: test_team.py.)
"""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MODULES, TINY, TINY_BRIDGE, Server, both, load, resume, short_episodes, steps_of
from fuzz_server import expected, replies

import ppo_racer
import sac_racer
from callbacks_lite import RaceStats, read_csv
from racer.game import bridge as racer_bridge
from racer.game.bridge import BridgeConnection, BridgeError
from racer.training.evaluation import evaluate
from racer.training.run import Run
from racer.training.terminal import Clock
from racer_env import RacerVectorEnv

SMALL = {"eval_every": 4096, "checkpoint_every": 1024, "start": "anywhere", "run_name": "run"}
BRIDGE = {"checkpoint_every": 200, "run_name": "run", "total_timesteps": 2000}
OTHER_FAULTS = [("sac", "die"), *(("ppo", f) for f in ("cut", "stall", "drip", "nan-ray"))]
OTHER_FAULTS = [pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_FAULTS]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses what only Linux has")


def small(name: str, folder: Path, **changes) -> dict:
    return {**TINY[name], **SMALL, "run_dir": folder, "config_path": short_episodes(folder, 300), **changes}


def on_bridge(name: str, folder: Path, ticks: int = 300, **changes) -> dict:
    config = short_episodes(folder, ticks)
    return {**TINY[name], **TINY_BRIDGE[name], **BRIDGE, "run_dir": folder, "config_path": config, **changes}


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


WRITES = [("ppo", 9), *(pytest.param("ppo", at, marks=pytest.mark.slow) for at in range(10, 15))]


@pytest.mark.parametrize(("name", "at"), [*WRITES, *(pytest.param("sac", at, marks=pytest.mark.slow) for at in (9, 10))])
def test_a_kill_in_the_middle_of_a_write_leaves_the_checkpoint_before_it(start, tmp_path, name, at):
    """At every stage of writing checkpoint.pt and best.pt: half a file, a whole one not yet in place."""
    script = tmp_path / "dying.py"
    script.write_text(DYING.format(name=name, at=at))
    process = start(name, script=script, **small(name, tmp_path, total_timesteps=8192))
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 9, out
    assert steps_of(name, tmp_path / "run" / "checkpoint.pt") in range(1024, 8192, 1024)
    result = resume(name, tmp_path / "run")
    assert result["finished"] and result["steps"] == 8192 and not list((tmp_path / "run").glob("*.tmp"))


@pytest.mark.slow
@linux
@both
def test_a_disk_that_fills_in_the_middle_of_a_run_stops_nothing_and_costs_no_checkpoint(start, tmp_path, name):
    """The system refuses all writing beyond a size: of checkpoints, metrics and TensorBoard's events alike."""
    import resource

    process = start(name, **small(name, tmp_path, total_timesteps=16_384, tensorboard=True))
    for line in process.stdout:
        if "track-01: " in line:  # the first evaluation: there are checkpoints by now
            break
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (500, 500))
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 1 and "\ndone: 16,384 steps" in out, out
    assert "The end of this run could not be written" in out and "--resume" in out
    assert "checkpoint.pt (File too large)" in out
    assert "Traceback" not in out and 1024 <= steps_of(name, tmp_path / "run" / "checkpoint.pt") < 16_384
    assert not list((tmp_path / "run").glob("*.pt*.tmp"))
    assert resume(name, tmp_path / "run")["finished"], "and it continues from there once there is space"


@pytest.mark.slow
@both
def test_a_folder_that_goes_away_in_the_middle_of_a_run_stops_nothing(start, tmp_path, name):
    process = start(name, **small(name, tmp_path, total_timesteps=16_384, tensorboard=True))
    for line in process.stdout:
        if "track-01: " in line:
            break
    with contextlib.suppress(PermissionError):  # Windows does not let go of open files: then nothing happens
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        (tmp_path / "run").write_text("in the way")
    out, _ = process.communicate(timeout=100)
    moved = (tmp_path / "elsewhere").exists()
    assert process.returncode == moved and ("The end of this run could not be written" in out) == moved, out
    assert "Traceback" not in out
    assert steps_of(name, tmp_path / ("elsewhere" if moved else "run") / "checkpoint.pt") >= 1024


# -- bridges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "fault"), [("ppo", "die"), *OTHER_FAULTS])
def test_a_bridge_fault_saves_and_exits_with_3(start, bridge, tmp_path, name, fault):
    script = tmp_path / "impatient.py"
    script.write_text(
        f"import sys, {name}_racer as t\nfrom racer.game import bridge\nbridge.REPLY_TIMEOUT_S = 1.5\nsys.exit(t.main())\n"
    )
    url = bridge("--fault", fault, "--after", "250").url
    process = start(name, script=script, **on_bridge(name, tmp_path, bridge_url=url))
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 3 and "Traceback" not in out, out
    assert re.search(rf"bridge connection [01] \({url}\), after 25[01] steps: ", out), out
    assert f"--resume {tmp_path / 'run'}" in out and steps_of(name, tmp_path / "run") == 500


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), [("ppo", "cut"), ("sac", "nan-ray")])
def test_with_retries_a_run_continues_through_faults_and_counts_them(start, bridge, tmp_path, name, fault):
    """Every connection fails after 250 steps: a run of 1,000 ticks meets that three times."""
    url = bridge("--fault", fault, "--after", "250").url
    process = start(name, **on_bridge(name, tmp_path, ticks=60, total_timesteps=2000, bridge_url=url, bridge_retries=2))
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0 and out.count("Reconnecting (attempt 1 of 2)") == 3, out
    rows = read_csv(tmp_path / "run" / "metrics.csv")
    faults = [float(row["racer/bridge_faults"]) for row in rows]
    assert faults == sorted(faults) and faults[0] == 0 and faults[-1] == 3
    assert sum(float(row["racer/episodes_this_rollout"] or 0) for row in rows) >= 3 * 2, "cut episodes count"
    assert rows[-1]["step"] == "2000"


@pytest.mark.slow
@both
def test_retries_end_when_the_bridge_does_not_come_back(start, tmp_path, name):
    server = Server("--fault", "die", "--after", "250")
    process = start(name, **on_bridge(name, tmp_path, bridge_url=server.url, bridge_retries=2))
    out, _ = process.communicate(timeout=100)
    server.kill()
    assert process.returncode == 3, out
    assert "Reconnecting (attempt 1 of 2)" in out and "(attempt 2 of 2)" in out and "(attempt 3" not in out
    assert "no game bridge at" in out and f"--resume {tmp_path / 'run'}" in out


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(racer_bridge, "LONGEST_PAUSE_S", 0.0)


def test_an_evaluation_that_never_gets_through_gives_up(bridge, no_pauses):
    """Every connection fails in tick 6 of an episode: each time the bridge comes back, and the count of retries with it."""
    envs = RacerVectorEnv(1, bridge_url=bridge("--fault", "cut", "--after", "5").url, retries=2)
    with pytest.raises(BridgeError, match=r"failed 3 times in a row"):
        evaluate(lambda obs: np.array([[0.0, 1.0, 0.0]]), envs, ["track-01"])
    assert envs.bridge_faults == 3
    envs.close()


class Faulty:
    """The embedded cars, whose step fails at certain ticks like a bridge's, before anything has happened."""

    def __init__(self, envs: RacerVectorEnv, faults: set[int]):
        self.envs, self.cars, self.faults, self.calls = envs, envs._fleet.cars, faults, 0
        self.track_ids, self.given = self.cars.track_ids, []
        envs._fleet.cars, envs.retries = self, 10
        envs._make_cars = lambda: self

    def reset(self, cars, seeds=None):
        self.given.append("reset")
        return self.cars.reset(cars, seeds)

    def step(self, actions, *how):
        self.calls += 1
        if self.calls in self.faults:
            raise BridgeError("gone")
        self.given.append(actions)
        yield from self.cars.step(actions, *how)

    def close(self):
        pass


@pytest.mark.parametrize("fault", [1, 2, 7, 20])
def test_what_ppo_learns_from_a_fault_is_one_tick_without_reward_that_ends_the_episode(fault, no_pauses):
    """Every other stored step was driven. The tick that was lost moved nobody: its end is its beginning, as truncated."""
    envs = RacerVectorEnv(3)
    envs.reset(seed=1)
    faulty = Faulty(envs, {fault})
    torch.manual_seed(0)
    agent, storage, stats = ppo_racer.Agent(), ppo_racer.Storage(20, 3), RaceStats(["track-01"] * 3, 3000)
    ppo_racer.rollout(agent, envs, storage, stats, Clock(), torch.Generator().manual_seed(0))
    at = fault - 1
    assert storage.ended.all(1).tolist() == [t == at for t in range(20)] and storage.discounts.all()
    assert not storage.rewards[at].any() and (np.delete(storage.rewards, at, axis=0) != 0).any()
    assert torch.equal(storage.final_obs[at], storage.obs[at]), "it is valued by itself"
    assert len(stats.rollout["episodes"]) == (0 if at == 0 else 3), "an episode of no ticks is none"
    twin, driven = RacerVectorEnv(3), iter(a for a in faulty.given if not isinstance(a, str))
    obs = twin.reset(seed=1)[0]
    for t in range(20):
        np.testing.assert_array_equal(storage.obs[t], obs)
        if t == at:
            obs = twin.reset(seed=1)[0]
            continue
        np.testing.assert_array_equal(next(driven), storage.actions[t].numpy().astype(np.float64))
        obs, rewards, *_ = twin.step(storage.actions[t].numpy())
        np.testing.assert_array_equal(storage.rewards[t], rewards)


def test_what_sac_learns_from_a_fault_is_an_action_that_was_cut_short(no_pauses):
    """It moves nobody and ends the episode as truncated; the next action does not follow from it."""
    envs = RacerVectorEnv(2, action_repeat=4, gamma=0.9)
    envs.reset(seed=1)
    Faulty(envs, {7})
    buffer, stats = sac_racer.ReplayBuffer(100, 2), RaceStats(["track-01"] * 2, 3000)
    for _ in range(10):
        obs = torch.from_numpy(envs.observations)
        next_obs, rewards, terminated, truncated, infos = envs.step([[0.1, 1.0, 0.0]] * 2)
        stats.step(infos)
        buffer.add(obs, torch.zeros(2, 3), rewards, next_obs, terminated | truncated, infos)
    follows = (buffer.obs[1:10] == buffer.next_obs[:9]).all(-1)
    assert follows.all(1).tolist() == [t != 6 for t in range(9)]
    assert buffer.ended[:10].all(1).tolist() == [t == 6 for t in range(10)]
    assert torch.equal(buffer.next_obs[6], buffer.obs[6]) and torch.equal(buffer.next_obs[6], buffer.next_obs[5])
    assert not buffer.rewards[6].any() and buffer.rewards[5].any()
    assert buffer.discounts[6].tolist() == [1, 1] and buffer.discounts[5, 0] == pytest.approx(0.9**4)
    assert len(stats.rollout["episodes"]) == 2 and envs.bridge_faults == 1


# -- learning that blows up ---------------------------------------------------------------------------------------------


BLOWN_UP = [("ppo", "compute_gae", 4, "train/loss"), ("sac", "soft_target", 20, "train/critic_loss")]


@pytest.mark.parametrize(("name", "function", "calls", "tag"), BLOWN_UP)
def test_a_loss_that_is_not_a_number_stops_the_run_and_is_not_saved(tmp_path, monkeypatch, name, function, calls, tag):
    module, factors = MODULES[name], iter([1.0] * (calls - 1))
    real = getattr(module, function)

    def poisoned(*arguments):
        result, factor = real(*arguments), next(factors, float("nan"))
        return tuple(part * factor for part in result) if isinstance(result, tuple) else result * factor

    monkeypatch.setattr(module, function, poisoned)
    with pytest.raises(FloatingPointError, match=f"^{tag} has become nan after step 1,536"):
        module.train(module.Args(**small(name, tmp_path, checkpoint_every=512, total_timesteps=8192)))
    agent = load(name, tmp_path / "run")["parts"]["agent"]
    assert steps_of(name, tmp_path / "run") == 1536
    assert all(torch.isfinite(value).all() for value in agent.values())


# -- rubbish -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1500, pytest.param(8_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_malformed_replies_are_always_an_error_and_no_wrong_number_is_accepted(count, monkeypatch, bridge):
    """The server answers the n-th connection's step with the n-th malformed reply, which this test makes too."""
    monkeypatch.setattr(racer_bridge, "REPLY_TIMEOUT_S", 20.0)
    server = bridge(str(count), script="fuzz_server.py")
    accepted = refused = 0
    for data, closes in replies(seed=count, count=count):
        connection = BridgeConnection(server.url)
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
            assert (observation, reward, terminated, truncated, info) == wanted, data
            accepted += 1
        connection.close()
    assert refused + accepted == count and refused > count * 0.8 and accepted > count * 0.01


# -- hours -------------------------------------------------------------------------------------------------------------


@linux
@pytest.mark.slow
@pytest.mark.timeout(600)
@both
def test_memory_stays_flat(tmp_path, monkeypatch, name):
    """As many iterations, rows, evaluations and checkpoints as in an hour of training, on a small scale."""
    module, sizes, real = MODULES[name], [], Run._log

    def log(self):
        sizes.append(int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)))
        real(self)

    monkeypatch.setattr(Run, "_log", log)
    own = {
        "ppo": {"action_repeat": 1, "rollout_steps": 16, "minibatch_size": 128},
        "sac": {"action_repeat": 2, "log_every": 256, "learning_starts": 256, "batch_size": 16, "updates": 2, "buffer_size": 320},
    }[name]  # fmt: skip
    args = module.Args(
        num_envs=16, total_timesteps=256 * 400, config_path=short_episodes(tmp_path, 60), run_dir=tmp_path,
        eval_every=256 * 20, checkpoint_every=256 * 20, **own,
    )  # fmt: skip
    module.train(args)
    tenth = len(sizes) // 10
    first, last = np.mean(sizes[:tenth]), np.mean(sizes[-tenth:])
    assert tenth == 40 and last < 1.05 * first, (first, last)
