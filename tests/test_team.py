"""Several processes, one driver: torch.distributed with real processes, for both trainers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MODULES, ROOT, TINY, both, flags, load, one_in_short, resume, short_episodes, steps_of, wait_for

from callbacks_lite import read_csv
from racer.training import processes
from racer.training.run import Run
from racer_env import RacerVectorEnv

USUAL = {"total_timesteps": 4096, "eval_every": 2048, "checkpoint_every": 1024, "start": "anywhere", "run_name": "a"}


@pytest.fixture
def launch(tmp_path):
    """launch(name, *words, processes=2, restarts=0, script=None, **settings) -> a running torchrun, killed after the test"""
    started = []

    def start(name, *words, processes=2, restarts=0, script=None, **settings):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval=0.1"]
        command += [f"--nproc-per-node={processes}", f"--max-restarts={restarts}", "--"]
        command += [str(script or ROOT / f"{name}_racer.py"), *map(str, words)]
        if "--resume" not in words:
            files = {"config_path": short_episodes(tmp_path, 300), "run_dir": tmp_path}
            command += flags({**TINY[name], **USUAL, **files, **settings})
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen(command, **pipes, text=True, env=environment, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(OSError, AttributeError):  # its workers too, where they can be found
            for pid in worker_pids(process.pid):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdout.close()


def finish(process) -> str:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    return out


def weights(folder: Path, name: str) -> torch.Tensor:
    agent = load(name, folder)["parts"]["agent"]
    return torch.cat([agent[key].double().flatten() for key in sorted(agent)])


def rows_of(folder: Path) -> list[dict]:
    return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in read_csv(folder / "metrics.csv")]


# Writes a checksum of the weights and the optimisers after every update of every process to sums-RANK.
SPY = """
import sys, zlib
import torch
import {name}_racer as trainer
real = trainer.update
def update(agent, *rest):
    result = real(agent, *rest)
    optimizers = [o for o in rest if isinstance(o, torch.optim.Optimizer)]
    vectors = [v for o in optimizers for state in o.state.values() for v in state.values()]
    sums = [zlib.crc32(v.detach().contiguous().numpy().tobytes()) for v in (*vectors, *agent.state_dict().values())]
    with open({folder!r} + "/sums-" + trainer.os.environ["RANK"], "a") as file:
        print(sums, file=file)
    return result
import os
trainer.update, trainer.os = update, os
trainer.run_as_script(trainer.main)
"""


@one_in_short
def test_all_processes_hold_the_same_bits_at_every_update(launch, tmp_path, name):
    script = tmp_path / "spy.py"
    script.write_text(SPY.format(name=name, folder=str(tmp_path)))
    finish(launch(name, script=script))
    sums = [(tmp_path / f"sums-{rank}").read_text().splitlines() for rank in "01"]
    assert len(sums[0]) >= 8 and sums[0] == sums[1] and len(set(sums[0])) == len(sums[0])


# Runs a trainer as a command; Python's clean-up leaves a file.
CLEAN_UP = """
import atexit, os, pathlib, runpy, sys
atexit.register(pathlib.Path({folder!r}, "cleaned-up-" + os.environ.get("RANK", "0")).touch)
sys.path.insert(0, {root!r})
runpy.run_path({root!r} + "/{name}_racer.py", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fails"), [("ppo", False), ("sac", True)])
def test_processes_leave_without_clean_up_once_all_is_told(launch, tmp_path, name, fails):
    """A thread of gloo that lets go of its last tensor while Python cleans up aborts the process (seen: one end in 230)."""
    script = tmp_path / "clean_up.py"
    script.write_text(CLEAN_UP.format(name=name, folder=str(tmp_path), root=str(ROOT)))
    process = launch(name, *(["--resume", tmp_path / "nowhere"] if fails else []), script=script)
    out, _ = process.communicate(timeout=120)
    assert (process.returncode != 0) == fails, out
    assert ("nowhere" in out and "exitcode  : 2" in out) if fails else out.count("\ndone: ") == 1, out
    assert not list(tmp_path.glob("cleaned-up-*"))


@pytest.mark.slow
@both
def test_a_run_of_several_processes_repeats_bit_for_bit_and_so_does_its_resumption(launch, tmp_path, name):
    for run in "ab":
        finish(launch(name, run_name=run))
    assert torch.equal(weights(tmp_path / "a", name), weights(tmp_path / "b", name))
    rows = [rows_of(tmp_path / run) for run in "ab"]
    assert rows[0] == rows[1] and len(rows[0]) == 8 and rows[0][-1]["step"] == "4096"
    for run in "ab":
        assert "resuming from step 4,096" in finish(launch(name, "--resume", tmp_path / run, "--total-timesteps", "6144"))
    assert torch.equal(weights(tmp_path / "a", name), weights(tmp_path / "b", name))


AVERAGE = """
import json, sys, numpy as np, torch, ppo_racer
import racer.training.processes as c
c.init_processes()
rank, size = c.rank(), c.world_size()
torch.manual_seed(rank)
agent = ppo_racer.Agent()
optimizer = torch.optim.Adam(agent.parameters())
agent.value(torch.randn(64, 14)).square().mean().backward()
optimizer.step()
weight = agent.critic[0].weight
def now():
    return {'weight': weight.flatten().tolist(), 'moment': optimizer.state[weight]['exp_avg'].flatten().tolist()}
before = now()
c.average_over_processes(agent, optimizer)
scaler = ppo_racer.RewardScaler(0.9, np.ones(12 // size))
rewards = np.random.default_rng(0).normal(size=(5, 12))[:, rank * (12 // size):][:, :12 // size]
scaler.update(rewards, np.zeros(rewards.shape, bool))
result = {'before': before, 'after': now(), 'moments': scaler.moments.tolist()}
open(sys.argv[sys.argv.index('--run-name') + 1] + str(rank), 'w').write(json.dumps(result))
c.exit_process(0, wait_for_others=True)
"""


@pytest.mark.slow
def test_networks_and_moments_are_averaged_and_statistics_are_those_of_all_cars(launch, tmp_path):
    script, results = tmp_path / "average.py", []
    script.write_text(AVERAGE)
    for size in (1, 2):
        finish(launch("ppo", script=script, processes=size, run_name=tmp_path / f"of{size}-"))
        results.append([json.loads((tmp_path / f"of{size}-{rank}").read_text()) for rank in range(size)])
    (one,), (first, second) = results
    assert one["after"] == one["before"], "alone, nothing changes"
    assert first["after"] == second["after"] and first["before"] != second["before"]
    for name, after in first["after"].items():
        np.testing.assert_allclose(after, np.mean([p["before"][name] for p in (first, second)], axis=0), atol=1e-6)
    assert first["moments"] == second["moments"]
    np.testing.assert_allclose(first["moments"], one["moments"], rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo"])
def test_laps_and_episodes_of_all_processes_are_logged_by_the_first(launch, tmp_path, name):
    out = finish(launch(name, total_timesteps=9216, start="grid"))
    assert out.count("16 cars on track-01, 2 processes") == 1 and out.count("\ndone: ") == 1
    ended = sum(float(row["racer/episodes_this_rollout"] or 0) for row in read_csv(tmp_path / "a" / "metrics.csv"))
    assert ended >= 16, "16 cars have ended an episode of 300 ticks in 576 ticks"
    parts = load(name, tmp_path / "a")["parts"]
    assert [len(envs["x"]) for envs in parts["envs"]] == [8, 8] and not torch.equal(*parts["generator"])
    assert json.loads((tmp_path / "a" / "args.json").read_text())["processes"] == 2


def test_a_stray_rank_does_not_matter(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert processes.rank() == 0 and processes.world_size() == 1


def test_a_stray_world_size_is_named(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert MODULES["ppo"].main() == 2
    said = capsys.readouterr().err
    assert "WORLD_SIZE is 3, but RANK, MASTER_ADDR, MASTER_PORT is not set; start several processes with torchrun" in said


def test_what_processes_cannot_share_is_said(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"--num-envs is 16; it must be a multiple of the number of processes \(3\)"):
        Run("ppo", MODULES["ppo"].Args(num_envs=16, minibatch_size=64)).__enter__()


def test_a_process_drives_its_part_of_the_fleet():
    tracks = ["track-01", "track-02", "track-03"]
    whole = RacerVectorEnv(8, tracks, start="anywhere")
    parts = [RacerVectorEnv(4, tracks, start="anywhere", first_car=first) for first in (0, 4)]
    actions = np.tile([[0.1, 1.0, 0.0]], (8, 1))
    observations = [whole.reset(seed=3)[0], np.concatenate([part.reset(seed=3)[0] for part in parts])]
    np.testing.assert_array_equal(*observations)
    np.testing.assert_array_equal(whole.track_lengths, np.concatenate([part.track_lengths for part in parts]))
    for _ in range(20):
        observations = [whole.step(actions)[0], np.concatenate([part.step(actions[:4])[0] for part in parts])]
        np.testing.assert_array_equal(*observations)


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_processes(launch, tmp_path, name="ppo"):
    finish(launch(name))
    before = load(name, tmp_path / "a")["parts"]
    result = resume(name, tmp_path / "a", total_timesteps=5120)
    assert result["finished"] and result["steps"] == 5120
    after = load(name, tmp_path / "a")["parts"]
    assert len(before["envs"]) == 2 and len(after["envs"]) == 1
    assert after["scaler"][0]["moments"][2] > before["scaler"][0]["moments"][2] > 1000, "the scale of rewards continues"
    out = finish(launch(name, "--resume", tmp_path / "a", "--total-timesteps", "6144", processes=4))
    assert "resuming with 4 instead of 1 processes" in out
    process = launch(name, "--resume", tmp_path / "a", "--total-timesteps", "7168", processes=3)
    out, _ = process.communicate(timeout=120)
    assert process.returncode and "it must be a multiple of the number of processes (3)" in out


def worker_pids(launcher: int) -> list[int]:
    """The processes torchrun has started, in order."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    return [int(pid) for pid in children.read_text().split()]


linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")


@linux
@one_in_short
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_process_that_dies_ends_the_run_and_says_how_to_resume(launch, tmp_path, name, victim):
    process = launch(name, total_timesteps=10**8)
    wait_for((tmp_path / "a" / "checkpoint.pt").exists, process)
    os.kill(worker_pids(process.pid)[victim], signal.SIGKILL)
    died = time.monotonic()
    out, _ = process.communicate(timeout=60)
    assert process.returncode and time.monotonic() - died < 60
    assert re.search(rf"process {1 - victim} of 2.* another process of this run has died or does not answer", out), out
    assert re.search(rf"torchrun --nproc_per_node=2 \S*{name}_racer.py --resume {tmp_path / 'a'}", out), out
    assert steps_of(name, tmp_path / "a") >= 1024


IMPATIENT = """
import ppo_racer, racer.training.processes
racer.training.processes.ANSWER_TIMEOUT_S = 4.0
ppo_racer.run_as_script(ppo_racer.main)
"""


@pytest.mark.slow
@linux
@pytest.mark.timeout(180)
def test_a_process_that_hangs_is_given_up_within_a_minute(launch, tmp_path):
    """Nothing closes its connections, as when a machine loses its power. (With a shorter patience than usual.)"""
    script = tmp_path / "impatient.py"
    script.write_text(IMPATIENT)
    assert processes.ANSWER_TIMEOUT_S < 60
    process = launch("ppo", script=script, total_timesteps=10**8)
    wait_for((tmp_path / "a" / "checkpoint.pt").exists, process)
    os.kill(worker_pids(process.pid)[1], signal.SIGSTOP)
    stopped = time.monotonic()
    for line in process.stdout:
        if "another process of this run has died or does not answer" in line:
            break
    else:
        raise AssertionError("nothing was said")
    assert time.monotonic() - stopped < 60


@pytest.mark.slow
@linux
@pytest.mark.parametrize(("name", "resumed"), [("ppo", False), ("sac", True)])
def test_torchrun_restarts_a_run_from_its_last_checkpoint_by_itself(launch, tmp_path, name, resumed):
    """With a folder name of its own making, and when it was resumed itself."""
    words, settings = [], {"run_name": "", "total_timesteps": 32_768, "eval_every": 10**9}
    if resumed:
        finish(launch(name))
        words = ["--resume", tmp_path / "a", "--total-timesteps", "32768"]
    process = launch(name, *words, restarts=2, **settings)
    folder = "a" if resumed else f"{name}-*"
    before = [path.stat().st_mtime for path in tmp_path.glob(f"{folder}/checkpoint.pt")]
    wait_for(lambda: [p.stat().st_mtime for p in tmp_path.glob(f"{folder}/checkpoint.pt")] > before, process)
    os.kill(worker_pids(process.pid)[1], signal.SIGKILL)
    out = finish(process)
    assert out.count("resuming from step") == 1 + resumed and "done: " in out
    (run,) = tmp_path.glob(folder)
    steps = [int(row["step"]) for row in read_csv(run / "metrics.csv")]
    assert steps == sorted(set(steps)) and len(steps) == steps[-1] // 512, "no row is lost, none is there twice"


@pytest.mark.slow
@linux
def test_a_restart_does_not_take_a_folder_that_the_launch_was_refused(launch, tmp_path):
    finish(launch("ppo"))
    before = (tmp_path / "a" / "best.pt").read_bytes()
    out, _ = launch("ppo", restarts=1, seed=7).communicate(timeout=120)
    assert out.count("is not empty; resume it") == 2 and (tmp_path / "a" / "best.pt").read_bytes() == before


@pytest.mark.slow
@linux
@both
def test_ctrl_c_stops_all_processes_together_with_one_checkpoint(launch, tmp_path, name):
    process = launch(name, total_timesteps=10**8)
    wait_for((tmp_path / "a" / "checkpoint.pt").exists, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, _ = process.communicate(timeout=60)
    stopped = re.search(r"stopped: ([\d,]+) steps", out)
    assert process.returncode and stopped, out
    assert out.count("stopping: finishing this iteration") == 1 and f"--resume {tmp_path / 'a'}" in out
    assert steps_of(name, tmp_path / "a") == int(stopped.group(1).replace(",", ""))


UNWRITABLE = """
import ppo_racer
from racer.training import run
run.write_checkpoint = lambda *_: False
ppo_racer.run_as_script(ppo_racer.main)
"""


@pytest.mark.slow
def test_what_could_not_be_saved_is_said_once(launch, tmp_path):
    script = tmp_path / "unwritable.py"
    script.write_text(UNWRITABLE)
    process = launch("ppo", script=script)
    out, _ = process.communicate(timeout=100)
    assert process.returncode and out.count("could not be written") == 1 and out.count("There is no checkpoint") == 1, out


@pytest.mark.slow
@both
def test_every_process_takes_its_share_of_the_bridges_and_a_fault_of_one_stops_all(launch, bridge, tmp_path, name):
    good, dying = bridge(), bridge("--fault", "die", "--after", "250")
    short = {"num_envs": 4, "start": "grid", "total_timesteps": 2000, "checkpoint_every": 10**9, "eval_every": 10**9}
    own = {"rollout_steps": 50, "minibatch_size": 50, "action_repeat": 1}
    short |= own if name == "ppo" else {"log_every": 100, "action_repeat": 2}
    process = launch(name, **short, bridge_url=(good.url, dying.url))
    out, _ = process.communicate(timeout=100)
    assert process.returncode and "exitcode  : 3" in out, out
    assert f"bridge connection 0 ({dying.url})" in out or f"bridge connection 1 ({dying.url})" in out
    assert f"bridge connection 0 ({good.url})" not in out and "Resume from the last checkpoint with: torchrun" in out
    assert steps_of(name, tmp_path / "a") in range(100, 1001)


@pytest.mark.slow
def test_the_others_wait_for_a_process_that_waits_for_its_bridge(launch, bridge, tmp_path):
    """Three pauses of 1, 2 and 4 s are longer than a process is waited for otherwise."""
    script, urls = tmp_path / "impatient.py", (bridge().url, bridge("--fault", "die", "--after", "250").url)
    script.write_text(IMPATIENT)
    short = {"num_envs": 4, "start": "grid", "total_timesteps": 2000, "rollout_steps": 50, "minibatch_size": 50}
    short |= {"action_repeat": 1}
    process = launch("ppo", script=script, **short, eval_every=10**9, bridge_url=urls, bridge_retries=3)
    out, _ = process.communicate(timeout=100)
    assert "(attempt 3 of 3)" in out and "exitcode  : 3" in out and "Resume from the last checkpoint with: torchrun" in out, out
    assert "another process of this run has died" not in out
