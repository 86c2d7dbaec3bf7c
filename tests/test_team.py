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
from conftest import OWN, Server, both, one_in_short

import ppo_racer
import sac_racer
from callbacks_lite import read_csv
from racer_env import RacerVectorEnv

ROOT = Path(__file__).resolve().parent.parent
USUAL = {"total-timesteps": 4096, "num-envs": 16, "eval-every": 2048, "checkpoint-every": 1024, "start": "anywhere"}
MODULES = {"ppo": ppo_racer, "sac": sac_racer}


@pytest.fixture
def launch(tmp_path):
    """launch(name, *flags, processes=2, restarts=0, script=None, **settings) -> a running torchrun, killed after the test"""
    started = []
    config = tmp_path / "short.json"
    config.write_text((ROOT / "ai-config.json").read_text().replace("3000", "300"))

    def start(name, *flags, processes=2, restarts=0, script=None, **settings):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={processes}",
            f"--max-restarts={restarts}",
        ]
        command += [
            "--standalone",
            "--monitor-interval=0.1",
            "--",
            str(script or ROOT / f"{name}_racer.py"),
            *flags,
        ]
        if "--resume" not in flags:
            given = {k.replace("_", "-"): v for k, v in settings.items()}
            for flag, value in {**USUAL, **OWN[name], "config-path": config, "run-dir": tmp_path, **given}.items():
                command += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
            command += ["--no-tensorboard"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        started.append(process)
        return process

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


def weights(folder: Path, name: str, file: str = "checkpoint.pt") -> torch.Tensor:
    agent = MODULES[name].load_checkpoint(folder / file)["agent"]
    return torch.cat([agent[key].double().flatten() for key in sorted(agent)])


# Writes a checksum of the weights and the optimiser after every update of every process to sums-RANK.
SPY = """
import sys, zlib
import {name}_racer as trainer
real = trainer.update
def update(agent, optimizers, *rest):
    result = real(agent, optimizers, *rest)
    vectors = [state for o in optimizers.values() for p in o.param_groups[0]["params"] for state in (p.data, *o.state[p].values())]
    sums = [zlib.crc32(v.detach().contiguous().numpy().tobytes()) for v in (*vectors, *agent.state_dict().values())]
    with open({folder!r} + "/sums-" + trainer.os.environ["RANK"], "a") as file:
        print(sums, file=file)
    return result
trainer.update = update
trainer.leave(trainer.main())
"""


@one_in_short
def test_all_processes_hold_the_same_bits_at_every_update(launch, tmp_path, name):
    script = tmp_path / "spy.py"
    script.write_text(SPY.format(name=name, folder=str(tmp_path)))
    finish(launch(name, script=script, run_name="a"))
    sums = [(tmp_path / f"sums-{rank}").read_text().splitlines() for rank in "01"]
    assert len(sums[0]) >= 8 and sums[0] == sums[1] and len(set(sums[0])) == len(sums[0])


# Runs a trainer as a command; Python's clean-up leaves a file.
CLEAN_UP = """
import atexit, os, pathlib, runpy, sys
atexit.register(pathlib.Path({folder!r}, "cleaned-up-" + os.environ.get("RANK", "0")).touch)
sys.path.insert(0, {root!r})
runpy.run_path({root!r} + "/{name}_racer.py", run_name="__main__")
"""


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.slow)])
@one_in_short
def test_processes_leave_without_clean_up_once_all_is_told(launch, tmp_path, name, fails):
    """A thread of gloo that lets go of its last tensor while Python cleans up aborts the process (seen: one end in 230)."""
    script = tmp_path / "clean_up.py"
    script.write_text(CLEAN_UP.format(name=name, folder=str(tmp_path), root=str(ROOT)))
    process = launch(name, *(["--resume", str(tmp_path / "nowhere")] if fails else []), script=script, run_name="a")
    out, _ = process.communicate(timeout=120)
    assert (process.returncode != 0) == fails, out
    assert ("nowhere" in out and "exitcode  : 2" in out) if fails else out.count("\ndone: ") == 1, out
    assert not list(tmp_path.glob("cleaned-up-*"))


@pytest.mark.slow
@both
def test_a_run_of_several_processes_repeats_bit_for_bit(launch, tmp_path, name):
    for run in "ab":
        finish(launch(name, run_name=run))
    assert torch.equal(weights(tmp_path / "a", name), weights(tmp_path / "b", name))
    rows = [
        [
            {k: v for k, v in row.items() if not k.startswith("time/")}
            for row in read_csv(tmp_path / run / "metrics.csv")
        ]
        for run in "ab"
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 8 and rows[0][-1]["step"] == "4096"


@pytest.mark.slow
def test_a_team_of_two_takes_the_step_of_one_on_all_samples(launch, tmp_path):
    """Gradients averaged over two halves of a minibatch are those of the minibatch, and statistics are those of all cars."""
    script = tmp_path / "average.py"
    script.write_text(
        "import json, sys, numpy as np, torch, ppo_racer\n"
        "team = ppo_racer.Team()\n"
        "torch.manual_seed(0)\n"
        "agent = ppo_racer.Agent()\n"
        "g = torch.Generator().manual_seed(1)\n"
        "batch = {'obs': torch.randn(64, 14, generator=g), 'returns': torch.randn(64, generator=g)}\n"
        "mine = {k: v[team.rank::team.size] for k, v in batch.items()}\n"
        "order = [torch.arange(len(mine['obs']))]\n"
        "args = ppo_racer.Args(max_grad_norm=1e9)\n"
        "optimizer = ppo_racer.make_optimizers(agent, 1e-2)['critic']\n"
        "learner = ppo_racer.update_critic(agent, optimizer, mine, order, 1, args)\n"
        "ppo_racer.learn_in_step(team, learner)\n"
        "gradient = optimizer.param_groups[0]['params'][0].grad\n"
        "scaler = ppo_racer.RewardScaler(12 // team.size, 0.9, 3, first_car=team.rank * 12 // team.size)\n"
        "rewards = np.random.default_rng(0).normal(size=(5, 12))[:, team.rank * scaler.returns.size:][:, :scaler.returns.size]\n"
        "scaler.update(rewards, np.zeros(rewards.shape, bool), team.gather)\n"
        "agent.update_normalizer(mine['obs'], team.gather)\n"
        "result = {'gradient': gradient.tolist(), 'moments': scaler.moments}\n"
        "result |= {'mean': agent.obs_mean.tolist(), 'var': agent.obs_var.tolist()}\n"
        "open(sys.argv[sys.argv.index('--run-name') + 1] + str(team.rank), 'w').write(json.dumps(result))\n"
        "ppo_racer.leave(0)\n"
    )
    results = []
    for size in (1, 2):
        finish(launch("ppo", script=script, processes=size, run_name=tmp_path / f"of{size}-"))
        results.append([json.loads((tmp_path / f"of{size}-{rank}").read_text()) for rank in range(size)])
    (one,), (first, second) = results
    assert first == second, "the same everywhere"
    for key in one:
        np.testing.assert_allclose(first[key], one[key], rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@both
def test_laps_and_episodes_of_all_processes_are_logged_by_the_first(launch, tmp_path, name):
    out = finish(launch(name, run_name="a", total_timesteps=9216, start="grid"))
    assert out.count("16 cars on track-01, 2 processes") == 1 and out.count("\ndone: ") == 1
    ended = sum(float(row["racer/episodes_this_rollout"] or 0) for row in read_csv(tmp_path / "a" / "metrics.csv"))
    assert ended >= 16, "16 cars have ended an episode of 300 ticks in 576 ticks"
    checkpoint = MODULES[name].load_checkpoint(tmp_path / "a")
    assert len(checkpoint["envs"]["x"]) == 16 and len(checkpoint["generators"]) == 2
    assert not torch.equal(*checkpoint["generators"])
    assert json.loads((tmp_path / "a" / "args.json").read_text())["processes"] == 2


@both
def test_a_stray_world_size_is_named_and_a_stray_rank_does_not_matter(monkeypatch, capsys, name):
    for said in ("", "x", "0", "-1", "1.5"):
        monkeypatch.setenv("WORLD_SIZE", said)
        with pytest.raises(ValueError, match=f"the environment variable WORLD_SIZE is {said!r}"):
            MODULES[name].Args()
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("RANK", "1")
    team = MODULES[name].Team()
    assert team.first and team.size == MODULES[name].Args().num_processes == 1
    monkeypatch.setattr(sys, "argv", ["racer.py", "--resume", "nowhere"])
    assert MODULES[name].main() == 2 and "nowhere does not exist" in capsys.readouterr().err


def test_a_process_drives_its_part_of_the_fleet():
    tracks = ["track-01", "track-02", "track-03"]
    whole = RacerVectorEnv(8, tracks, start="anywhere")
    parts = [RacerVectorEnv(4, tracks, start="anywhere", first_car=first) for first in (0, 4)]
    actions = np.tile([[0.1, 1.0, 0.0]], (8, 1))
    observations = [whole.reset(seed=3)[0], np.concatenate([part.reset(seed=3)[0] for part in parts])]
    np.testing.assert_array_equal(*observations)
    for _ in range(20):
        observations = [whole.step(actions)[0], np.concatenate([part.step(actions[:4])[0] for part in parts])]
        np.testing.assert_array_equal(*observations)
    scaler = ppo_racer.RewardScaler(4, 0.9, 3, first_car=4)
    assert [list(range(4))[cars] for cars in scaler.tracks] == [
        [2],
        [0, 3],
        [1],
    ]  # cars 4 to 7 of tracks 0, 1, 2, 0, 1, 2, 0, 1


@pytest.mark.slow
@both
def test_several_processes_resume_bit_for_bit(launch, tmp_path, name):
    finish(launch(name, run_name="whole"))
    finish(launch(name, run_name="half"))
    assert torch.equal(weights(tmp_path / "whole", name), weights(tmp_path / "half", name))
    for run in ("whole", "half"):
        out = finish(launch(name, "--resume", str(tmp_path / run), "--total-timesteps", "6144"))
        assert "going on from step 4,096" in out
    assert torch.equal(weights(tmp_path / "whole", name), weights(tmp_path / "half", name))


@pytest.mark.slow
@both
def test_a_run_goes_on_with_another_number_of_processes(launch, tmp_path, name):
    finish(launch(name, run_name="a"))
    module = MODULES[name]
    before = module.load_checkpoint(tmp_path / "a")
    result = module.train(module.Args(resume=tmp_path / "a", total_timesteps=5120))
    assert result["finished"] and result["steps"] == 5120
    after = module.load_checkpoint(tmp_path / "a")
    assert len(before["generators"]) == 2 and len(after["generators"]) == 1 and len(after["envs"]["x"]) == 16
    out = finish(launch(name, "--resume", str(tmp_path / "a"), "--total-timesteps", "6144", processes=4))
    assert "going on with 4 instead of 1 processes: as good, but with other random numbers, so not bit for bit" in out
    process = launch(name, "--resume", str(tmp_path / "a"), "--total-timesteps", "7168", processes=3)
    out, _ = process.communicate(timeout=120)
    assert (
        process.returncode
        and "which 3 processes cannot share equally; it can go on with any number of processes that divides 16" in out
    )


def worker_pids(launcher: int) -> list[int]:
    """The processes torchrun has started, in order."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    return [int(pid) for pid in children.read_text().split()]


def wait_for(condition, process, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
        time.sleep(0.02)


linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")


@linux
@one_in_short
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_process_that_dies_ends_the_run_and_says_how_to_go_on(launch, tmp_path, name, victim):
    process = launch(name, run_name="a", total_timesteps=10**8, checkpoint_every=1024)
    wait_for((tmp_path / "a" / "checkpoint.pt").exists, process)
    os.kill(worker_pids(process.pid)[victim], signal.SIGKILL)
    died = time.monotonic()
    out, _ = process.communicate(timeout=60)
    assert process.returncode and time.monotonic() - died < 60
    assert re.search(rf"process {1 - victim} of 2 .* another one of this run has died or does not answer", out), out
    assert f"torchrun --nproc_per_node=2 {name}_racer.py" in out.replace(os.path.relpath(ROOT) + "/", "")
    assert f"--resume {tmp_path / 'a'}" in out
    assert MODULES[name].load_checkpoint(tmp_path / "a")["counters"]["steps"] >= 1024


@pytest.mark.slow
@linux
@pytest.mark.timeout(180)
def test_a_process_that_hangs_is_given_up_within_a_minute(launch, tmp_path):
    """Nothing closes its connections, as when a machine loses its power."""
    process = launch("ppo", run_name="a", total_timesteps=10**8)
    wait_for((tmp_path / "a" / "checkpoint.pt").exists, process)
    os.kill(worker_pids(process.pid)[1], signal.SIGSTOP)
    stopped = time.monotonic()
    for line in process.stdout:
        if "another one of this run has died or does not answer" in line:
            break
    else:
        raise AssertionError("nothing was said")
    assert time.monotonic() - stopped < 60


@pytest.mark.slow
@linux
@both
@pytest.mark.skipif(
    torch.__version__.startswith("2.3."), reason="the torchrun of torch 2.3 cannot start processes again"
)
def test_torchrun_restarts_a_run_from_its_last_checkpoint_by_itself(launch, tmp_path, name):
    process = launch(name, restarts=2, total_timesteps=32_768, eval_every=10**9)
    wait_for(lambda: list(tmp_path.glob(f"{name}-*/checkpoint.pt")), process)
    os.kill(worker_pids(process.pid)[1], signal.SIGKILL)
    out = finish(process)
    assert "going on from step" in out and "done: " in out
    (folder,) = tmp_path.glob(f"{name}-*")
    steps = [int(row["step"]) for row in read_csv(folder / "metrics.csv")]
    assert steps == sorted(set(steps)) and len(steps) == steps[-1] // 512, "no row is lost, none is there twice"


@pytest.mark.slow
@linux
@one_in_short
def test_ctrl_c_stops_all_processes_together_with_one_checkpoint(launch, tmp_path, name):
    process = launch(name, run_name="a", total_timesteps=10**8)
    wait_for((tmp_path / "a" / "checkpoint.pt").exists, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, _ = process.communicate(timeout=60)
    stopped = re.search(r"stopped: ([\d,]+) steps", out)
    assert process.returncode and stopped, out
    assert out.count("stopping: finishing this update") == 1 and f"--resume {tmp_path / 'a'}" in out
    steps = MODULES[name].load_checkpoint(tmp_path / "a")["counters"]["steps"]
    assert steps == int(stopped.group(1).replace(",", ""))


@pytest.mark.slow
@both
def test_every_process_takes_its_share_of_the_bridges_and_a_fault_of_one_stops_all(launch, tmp_path, name):
    good, dying = Server(), Server("--fault", "die", "--after", "120")
    short = {"num_envs": 4, "start": "grid", "total_timesteps": 2000, "run_name": "a", "checkpoint_every": 10**9}
    short |= {"rollout_steps": 50, "minibatch_size": 50} if name == "ppo" else {"log_every": 100, "action_repeat": 2}
    try:
        process = launch(name, **short, eval_every=10**9, bridge_url=(good.url, dying.url))
        out, _ = process.communicate(timeout=100)
    finally:
        good.kill()
        dying.kill()
    assert process.returncode and "exitcode  : 3" in out, out
    assert f"bridge connection 0 ({dying.url})" in out or f"bridge connection 1 ({dying.url})" in out
    assert f"bridge connection 0 ({good.url})" not in out and f"--resume {tmp_path / 'a'}" in out
    assert MODULES[name].load_checkpoint(tmp_path / "a")["counters"]["steps"] in range(100, 481)


def test_what_processes_cannot_share_is_said(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for module in MODULES.values():
        assert module.Args().num_envs % 3 == 0
        with pytest.raises(
            ValueError,
            match="--num-envs is 16, which 3 processes cannot share equally; make it 15, say",
        ):
            module.Args(num_envs=16)
        with pytest.raises(ValueError, match="each needs a car at least in 3 processes"):
            module.Args(num_envs=3, track_id=("track-01", "track-02"))
        with pytest.raises(ValueError, match="need one process only"):
            module.Args(evaluate=Path("runs"))
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(
            ValueError, match=r"WORLD_SIZE is 3, .* RANK, MASTER_ADDR, MASTER_PORT is not set; start them with torchrun"
        ):
            module.train(module.Args())
    with pytest.raises(ValueError, match="--minibatch-size is 5, of which 3 processes have less than 2 samples"):
        ppo_racer.Args(minibatch_size=5)


def test_a_restart_finds_its_own_run_and_the_newest(tmp_path, monkeypatch):
    """What torchrun's second attempt goes on with: never what another launch left, nor what --resume was not told to take."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    module, small = ppo_racer, {"num_envs": 4, "rollout_steps": 16, "minibatch_size": 32, "total_timesteps": 128}
    small |= {"run_dir": tmp_path, "tensorboard": False, "eval_every": 64, "checkpoint_every": 64}
    assert module.find_run(module.Args(**small)) == (None, None)
    folders = []
    for i, name in enumerate(("other", "older", "newer")):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another" if name == "other" else "job")
        folders.append(module.make_run_folder(module.Args(**small, run_name=name)))
        os.utime(folders[-1] / "args.json", (1e9 + i, 1e9 + i))
    assert module.find_run(module.Args(**small)) == (folders[2], None), "begun, but nothing saved yet"
    assert module.train(module.Args(**small))["run_folder"] == str(folders[2])
    run = module.load_checkpoint(folders[2])
    folder, checkpoint = module.find_run(module.Args(**small))
    assert folder == folders[2] and checkpoint["counters"] == run["counters"]
    best = folders[2] / "best.pt"
    assert module.find_run(module.Args(resume=best))[1]["counters"] == run["counters"], "this launch has saved since"
    torch.save({**run, "launch": "before"}, folders[2] / "checkpoint.pt")
    expected = module.load_checkpoint(best)["counters"]
    assert module.find_run(module.Args(resume=best))[1]["counters"] == expected, (
        "it has not: begin where it was told to"
    )
    (folders[2] / "checkpoint.pt").write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="is no checkpoint, or a damaged one"):
        module.find_run(module.Args(**small))
