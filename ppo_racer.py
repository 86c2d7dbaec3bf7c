"""PPO for the top-down racer, whole in this file: from nothing to a driver better than the game's published one.

    python ppo_racer.py --total-timesteps 2000000                    # about 14 s: laps of 6.5 s on track-01
    python ppo_racer.py --track-id track-03 --total-timesteps 4000000
    python ppo_racer.py --track-id track-01 track-02 track-03 --total-timesteps 8000000       # one driver for all three
    python ppo_racer.py --bridge-url ws://localhost:9876             # train in the real game (its bridge has to run)
    python ppo_racer.py --resume runs/NAME                           # go on, bit for bit, after any interruption
    python ppo_racer.py --evaluate runs/NAME/best.pt --episodes 10   # laps and lap times of a trained driver
    python ppo_racer.py --export game/driver --checkpoint runs/NAME  # for the browser game: model.onnx
    torchrun --nproc_per_node=8 ppo_racer.py --num-envs 8192 --minibatch-size 8192           # on more cores or machines
    tensorboard --logdir runs

PPO (Schulman et al. 2017) repeats three steps: drive all cars for a few ticks with the policy as it is (`rollout`), work
out how much better each action went than expected (`compute_gae`), and take a few optimiser steps toward the better ones
without moving far from the policy that drove (`ppo_loss`, `update`). Everything else here keeps that honest: a normaliser
inside the network, a scaler for rewards, an evaluation without noise, and a checkpoint with all of it.

Read on in this order: Args, Agent, rollout, compute_gae, update, checkpoint, train.
Shapes: T ticks of a rollout, N cars, B = T * N samples, of this process where there are several.
"""

from __future__ import annotations

import time

PROCESS_START_S = time.perf_counter()  # before the slow imports: "seconds from the start" means what a user waits

import contextlib  # noqa: E402
import copy  # noqa: E402
import dataclasses  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import shlex  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402
import zlib  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from datetime import timedelta  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Annotated  # noqa: E402

import gymnasium  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import tyro  # noqa: E402
from torch import nn  # noqa: E402

from callbacks_lite import (  # noqa: E402
    TICKS_PER_SECOND,
    Clock,
    Episode,
    MetricsLogger,
    Progress,
    RaceStats,
    describe,
    eval_metrics,
    evaluate,
    lap_replay,
    lap_time,
    racing_line,
    say,
    score,
    summarize,
    warn,
)
from racer_env import (  # noqa: E402
    ACTION_HIGH,
    ACTION_LOW,
    DEFAULT_CONFIG_PATH,
    OBS_HIGH,
    OBS_LOW,
    OBS_SIZE,
    BridgeError,
    RacerVectorEnv,
    drive_again,
)

ALGORITHM = "ppo"
CHECKPOINT_FORMAT = 2
CHECKPOINT_KEYS = ("args", "agent", "optimizers", "scaler", "stats", "envs", "config", "generators", "counters", "best")
NOT_OVER_CARS = ("moments", "episodes", "totals")  # what in a state is of the run, and not an array over its cars
NOT_SETTINGS = (
    "resume",
    "evaluate",
    "episodes",
    "json",
    "export",
    "checkpoint",
)  # flags that say what to do, not how to train
MAY_CHANGE = ("total_timesteps", "eval_every", "checkpoint_every", "tensorboard", "bridge_retries")  # on --resume
# Mean and deviation of observations on these tracks at a fair pace, rounded: rays, speed, yaw rate, steer, arc, centreline.
OBS_MEAN = (*[0.25] * 9, 0.6, 0.0, 0.0, 0.5, 0.2)
OBS_STD = (*[0.2] * 9, 0.25, 0.3, 0.5, 0.3, 0.15)
NORM_EPSILON = 1e-6
PUBLISHED_LAP_TICKS = {"track-01": 442, "track-03": 1069}  # flying laps of the driver the game's authors published
EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_BRIDGE, EXIT_TEAM = 130, 143, 3, 4
LONGEST_PAUSE_S = 30.0  # before connecting to a bridge again
RANK_SEED_STRIDE = 1_000_003  # between the random numbers of the processes of a run
ANSWER_S = 45.0  # a process of the run that has not answered for so long is given up
# Types of flags that may be left out; what happens then, their help says itself.
MaybeInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
MaybeFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
MaybeStr = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
MaybePath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]

# ======================================================================================================================
# Args
# ======================================================================================================================


@dataclasses.dataclass
class Args:
    """Train, resume or evaluate a driver with PPO."""

    # -- run
    total_timesteps: MaybeInt = None
    """environment steps of the whole run, all cars together (default 2,000,000)"""
    seed: int = 1
    """seed of everything random: same seed, same command, same numbers"""
    threads: int = 1
    """CPU threads for the network; more gain nothing on one this small, and the last bits depend on their number"""
    resume: MaybePath = None
    """go on from this checkpoint or run folder; its own settings count, --total-timesteps may extend it"""
    evaluate: MaybePath = None
    """drive this checkpoint (or a run folder's best.pt) without noise instead of training"""
    episodes: int = 10
    """with --evaluate: episodes per track"""
    json: MaybePath = None
    """with --evaluate: also write the results to this file"""
    export: MaybePath = None
    """write the driver of --checkpoint to this folder, as the browser game loads it (ONNX)"""
    checkpoint: MaybePath = None
    """with --export: the checkpoint or run folder"""

    # -- env
    track_id: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="TRACK ...", help_behavior_hint="")] = None
    """track, or several to train one driver on all: names or .json files (default track-01; with --evaluate, those trained on)"""
    config_path: MaybePath = None
    """reward weights and episode limits (default: ai-config.json)"""
    start: MaybeStr = None
    """where episodes start: grid, or anywhere, which teaches recovering (default grid; to train on several tracks, anywhere)"""
    bridge_url: Annotated[tuple[str, ...], tyro.conf.arg(metavar="URL ...", help_behavior_hint="")] = ()
    """train in the real game behind these URLs instead of the embedded engine"""
    bridge_retries: int = 0
    """when the bridge fails, connect again, up to so many times in a row; 0 stops, with a checkpoint"""
    num_envs: MaybeInt = None
    """cars driven at once (default 512; 8 on a bridge, where every car is a connection)"""

    # -- algorithm
    gamma: float = 0.98
    """discount a tick: 0.98 looks about 50 ticks (0.8 s) ahead"""
    gae_lambda: float = 0.95
    """how far advantages trust measured rewards (1) over the critic (0)"""
    clip_coef: float = 0.2
    """how far the probability of an action may move in one update, as a ratio"""
    ent_coef: float = 0.0
    """bonus for staying random; these tracks need none"""
    init_std: float = 0.5
    """first standard deviation of the inputs; learned from then on"""
    init_throttle: float = 1.0
    """first mean of the throttle, with the brake off: a car that presses it finds out about driving sooner"""
    hidden: MaybeInt = None
    """width of the two hidden layers of actor and critic (default 64; 96 for several tracks)"""
    norm_steps: int = 0
    """gather observation statistics for so many steps, then freeze them (default: fixed ones, which gave faster laps)"""

    # -- optimisation
    learning_rate: float = 2e-3
    """Adam's step size at the start"""
    anneal_lr: bool = True
    """let the learning rate fall to 0 over the run"""
    rollout_steps: MaybeInt = None
    """ticks per car between updates (default 32; 512 on a bridge)"""
    minibatch_size: MaybeInt = None
    """samples per optimiser step, about: a rollout is cut into equal parts (default 1,024; 512 on a bridge)"""
    update_epochs: MaybeInt = None
    """passes over a rollout (default 2; 8 on a bridge, where steps are dear)"""
    max_grad_norm: float = 0.5
    """gradients are scaled down to this length"""
    target_kl: MaybeFloat = None
    """end an update early once the policy has moved this far"""

    # -- logging and checkpoints
    run_dir: Path = Path("runs")
    """where run folders go"""
    run_name: MaybeStr = None
    """name of the run folder (default: algorithm, track, seed and time)"""
    eval_every: MaybeInt = None
    """steps between evaluations: an episode per track from the grid, without noise (default 400,000; 20,000 on a bridge)"""
    checkpoint_every: MaybeInt = None
    """steps between checkpoints; one comes at the end, on Ctrl+C and if the bridge fails (default 400,000; 20,000 on a bridge)"""
    tensorboard: bool = True
    """write TensorBoard events (metrics.csv is always written)"""

    def __post_init__(self):
        # What was given, as against left at its default: --resume and --evaluate have to know. (main looks at the command.)
        self.given = {field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default}
        on_bridge = bool(self.bridge_url)
        for name, embedded, bridge in (
            ("track_id", ("track-01",), ("track-01",)),
            ("total_timesteps", 2_000_000, 200_000),
            ("num_envs", 512, 8),
            ("rollout_steps", 32, 512),
            ("minibatch_size", 1_024, 512),
            ("update_epochs", 2, 8),
            ("eval_every", 400_000, 20_000),
            ("checkpoint_every", 400_000, 20_000),
        ):
            if getattr(self, name) is None:
                setattr(self, name, bridge if on_bridge else embedded)
                if name == "num_envs":  # an equal share for every process
                    self.num_envs = math.ceil(self.num_envs / self.num_processes) * self.num_processes
        if self.hidden is None:
            self.hidden = 64 if len(self.track_id) == 1 else 96
        if self.start is None:  # the real game knows the grid only
            to_recover = len(self.track_id) > 1 and self.evaluate is None and not on_bridge
            self.start = "anywhere" if to_recover else "grid"
        self._check_ranges()
        if self.target_kl is not None and not 0 < self.target_kl < math.inf:
            raise ValueError(f"--target-kl is {self.target_kl}; it must be more than 0, or left out")
        self._check_shares()
        if self.minibatch_size < 2 * self.num_processes > 2:
            raise ValueError(
                f"--minibatch-size is {self.minibatch_size}, of which {self.num_processes} processes have less than 2 samples "
                "each; make it larger"
            )
        if self.minibatch_size > self.steps_per_iteration:
            raise ValueError(
                f"--minibatch-size is {self.minibatch_size}, but a rollout has only {self.steps_per_iteration} samples "
                f"(--num-envs {self.num_envs} x --rollout-steps {self.rollout_steps}): make it smaller"
            )
        if sum(value is not None for value in (self.resume, self.evaluate, self.export)) > 1:
            raise ValueError("--resume goes on training, --evaluate and --export do not train; give one of them")
        if (self.export is None) != (self.checkpoint is None):
            raise ValueError(
                "--export DIR and --checkpoint PATH go together: where to, and what; give both, or neither"
            )
        if self.json is not None and self.evaluate is None:
            raise ValueError("--json is for the results of --evaluate; training writes metrics.csv to the run folder")

    def _check_shares(self) -> None:
        """Every process, of one or more, drives as many cars as the others, and some on every track."""
        cars, processes, tracks = self.num_envs, self.num_processes, len(self.track_id)
        if cars % processes:
            what = f"make it {max(cars // processes, 1) * processes}, say"
            if self.resume is not None:
                what = f"it can go on with any number of processes that divides {cars}"
            raise ValueError(f"--num-envs is {cars}, which {processes} processes cannot share equally; {what}")
        if cars < tracks * processes:
            each = (
                "each needs a car at least" if processes == 1 else f"each needs a car at least in {processes} processes"
            )
            raise ValueError(f"--num-envs is {cars}, but there are {tracks} tracks; {each}")
        if processes > 1 and (self.evaluate is not None or self.export is not None):
            raise ValueError("--evaluate and --export need one process only: leave torchrun out")

    def _check_ranges(self) -> None:
        counts = (
            "total_timesteps",
            "episodes",
            "num_envs",
            "hidden",
            "rollout_steps",
            "minibatch_size",
            "update_epochs",
        )
        for name, least, most in (
            *((name, 1, 2**53) for name in (*counts, "eval_every", "checkpoint_every")),
            *((name, 0, 1e9) for name in ("norm_steps", "ent_coef", "bridge_retries")),
            *((name, 0, 1) for name in ("gamma", "gae_lambda")),
            *((name, 1e-9, 1e9) for name in ("clip_coef", "learning_rate", "max_grad_norm", "init_std")),
            ("init_throttle", -100, 100),
            ("seed", 0, 2**53),
            ("threads", 1, 1024),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be between {least:g} and {most:g}")

    @property
    def num_processes(self) -> int:
        """How many train together; all settings are the whole run's. torchrun says so."""
        return processes_of_the_run()

    @property
    def steps_per_iteration(self) -> int:
        return self.num_envs * self.rollout_steps

    @property
    def num_iterations(self) -> int:
        return max(1, math.ceil(self.total_timesteps / self.steps_per_iteration))


# ======================================================================================================================
# Team
# ======================================================================================================================


def processes_of_the_run() -> int:
    """What torchrun says, or 1."""
    said = os.environ.get("WORLD_SIZE", "1")
    if not said.isdecimal() or int(said) < 1:
        raise ValueError(f"the environment variable WORLD_SIZE is {said!r}, which is no number of processes; unset it")
    return int(said)


class TeamError(RuntimeError):
    """Another process of the run has died, or does not answer any more."""


class Team:
    """The processes that train one driver: this one alone, or as many as torchrun has started, on one machine or several.

    Every process drives an equal share of the cars. They average their gradients, so all take the same steps and hold the
    same weights. What one of them needs from the others it asks for here; the first one evaluates, logs and writes.
    """

    def __init__(self, bridge_retries: int = 0):
        self.size = processes_of_the_run()
        self.rank = int(os.environ.get("RANK", 0)) if self.size > 1 else 0
        if self.size > 1:
            lacking = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
            if lacking:
                raise ValueError(
                    f"WORLD_SIZE is {self.size}, so there should be more processes, but {', '.join(lacking)} is not set; start "
                    "them with torchrun, or unset WORLD_SIZE"
                )
            with self._someone_missing():
                timeout = timedelta(seconds=ANSWER_S)
                place = {"store": self._meeting_place(timeout), "rank": self.rank, "world_size": self.size}
                dist.init_process_group("gloo", timeout=timeout, **place)
                # For waits while one evaluates, writes a large file or looks for a bridge.
                self.patient = dist.new_group(timeout=timedelta(minutes=10 + 2 * bridge_retries))
        self.bridge_retries = bridge_retries

    def _meeting_place(self, timeout: timedelta) -> dist.Store:
        """Where the processes find each other: the launcher's store. After a restart it may still hold the addresses of
        processes that are gone, so every attempt has a part of its own."""
        env = os.environ
        own = self.first and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # no launcher, so nobody else has one
        libuv = sys.platform != "win32"  # which has no build with it
        address = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        store = dist.TCPStore(*address, is_master=own, timeout=timeout, use_libuv=libuv)
        return dist.PrefixStore(f"attempt-{env.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)

    @property
    def first(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def _someone_missing(self):
        try:
            yield
        except RuntimeError as error:
            raise TeamError(
                f"process {self.rank} of {self.size} (0 to {self.size - 1}): another one of this run has died or does not "
                f"answer ({str(error).strip()[:160]})"
            ) from error

    def average(self, *vectors: torch.Tensor) -> None:
        """Replace vectors by their means over all processes, which come out the same to the last bit everywhere."""
        if self.size > 1:
            together = torch.cat(vectors)
            with self._someone_missing():
                dist.all_reduce(together)
            for vector, mean in zip(vectors, (together / self.size).split([len(v) for v in vectors]), strict=True):
                vector.copy_(mean)

    def gather(self, value, patiently: bool = False) -> list:
        """Everybody's value, the first one's first, for everybody."""
        values = [value] * self.size
        if self.size > 1:
            with self._someone_missing():
                dist.all_gather_object(values, value, group=self.patient if patiently else None)
        return values

    def collect(self, value) -> list | None:
        """Everybody's value for the first one only."""
        values = [value] * self.size if self.first else None
        if self.size > 1:
            with self._someone_missing():
                dist.gather_object(value, values, dst=0, group=self.patient)
        return values

    def share(self, function, *arguments):
        """Let the first process do something, and tell all what came of it, failures too."""
        outcome = [None]
        if self.first:
            try:
                outcome = [function(*arguments)]
            except (BridgeError, ValueError, OSError) as error:
                outcome = [error]
        if self.size > 1:
            with self._someone_missing():
                dist.broadcast_object_list(outcome, src=0, group=self.patient)
        if isinstance(outcome[0], Exception):
            outcome[0].shared = True
            raise outcome[0]
        return outcome[0]

    @contextlib.contextmanager
    def together(self):
        """A bridge that fails one process in this block fails all at its end, so that nobody waits for it."""
        mine = None
        try:
            yield
        except BridgeError as error:
            mine = error
        for error in self.gather(mine, patiently=self.bridge_retries > 0):
            if error is not None:
                error.shared = True
                raise error

    def __enter__(self):
        return self

    def __exit__(self, _type, error, _traceback) -> None:
        """Where all know how it ended, wait for the first one to finish its files and its report: torchrun ends every process as
        soon as one has failed."""
        if error is None or getattr(error, "shared", False):
            self.gather(None, patiently=True)


def leave(code: int) -> None:
    """End the process; one of several without Python's own clean-up: a thread of gloo that lets go of its last tensor in the
    middle of that aborts the process (one end in 230), and to end the thread first hangs with some versions of torch."""
    if dist.is_initialized():
        say("", end="")  # what is still in the buffer
        os._exit(code)
    sys.exit(code)


# ======================================================================================================================
# Agent
# ======================================================================================================================


class Agent(nn.Module):
    """Actor, critic and the normaliser of their observations: one state_dict drives.

    The policy is a Gaussian over the raw inputs (steer, throttle, brake) with one learned deviation each. A sample goes to
    the game as it is, and the game clamps it to the box. So the action whose probability is optimised is the action that
    was given; the clamp is a part of the environment. (Squashing with tanh instead makes full throttle and full lock, where
    a racing car lives, hard to reach.) Without noise the driver gives the mean.
    """

    def __init__(self, hidden: int = 64, init_std: float = 0.5, init_throttle: float = 1.0):
        super().__init__()
        self.actor = mlp(hidden, len(ACTION_LOW), output_gain=0.01)
        self.critic = mlp(hidden, 1, output_gain=1.0)
        self.log_std = nn.Parameter(torch.full((len(ACTION_LOW),), math.log(init_std)))
        with torch.no_grad():
            self.actor[-1].bias.copy_(torch.tensor([0.0, init_throttle, -init_throttle / 2]))
        self.register_buffer("obs_mean", torch.tensor(OBS_MEAN))
        self.register_buffer("obs_var", torch.tensor(OBS_STD).square())
        self.register_buffer("obs_count", torch.zeros((), dtype=torch.float64))

    def normalize(self, obs):
        return (obs - self.obs_mean) * torch.rsqrt(self.obs_var + NORM_EPSILON)

    @torch.no_grad()
    def update_normalizer(self, obs, gather=lambda value: [value]) -> None:
        """Take a batch (B, 14) into the running mean and variance, and through `gather` those of other processes."""
        moments = self.obs_mean.double(), self.obs_var.double(), self.obs_count
        for batch in gather((obs.double().mean(0), obs.double().var(0, unbiased=False), len(obs))):
            moments = merge_moments(moments, batch)
        for buffer, value in zip((self.obs_mean, self.obs_var, self.obs_count), moments, strict=True):
            buffer.copy_(value)

    def value(self, obs):
        return self.critic(self.normalize(obs)).squeeze(-1)

    def driver(self):
        """What the driver does without noise: a function from observations (N, 14) to inputs in the box (N, 3), in NumPy.

        For a few cars a network this small is all overhead in torch, and evaluation would take three times as long.
        """
        mean, scale = self.obs_mean.numpy().copy(), torch.rsqrt(self.obs_var + NORM_EPSILON).numpy()
        layers = [
            (layer.weight.detach().numpy().T.copy(), layer.bias.detach().numpy().copy()) for layer in self.actor[::2]
        ]

        def drive(obs: np.ndarray) -> np.ndarray:
            x = (obs - mean) * scale
            for weight, bias in layers[:-1]:
                x = np.maximum(x @ weight + bias, 0)
            return np.clip(x @ layers[-1][0] + layers[-1][1], ACTION_LOW, ACTION_HIGH)

        return drive

    def to_onnx(self, onnx):
        """The driver as a model of ONNX: normalised observations (batch, 14) -> inputs in the box (batch, 3)."""
        net = OnnxNet(onnx)
        x = "obs"
        for layer in self.actor[::2]:
            x = net.add("Gemm", x, net.number(layer.weight), net.number(layer.bias), transB=1)
            if layer is not self.actor[-1]:
                x = net.add("Relu", x)
        return net.model(x)

    def observation_stats(self) -> dict:
        """`normalize` in the numbers of the game's own file, with a clip that no observation reaches."""
        farthest = torch.maximum(torch.tensor(OBS_HIGH) - self.obs_mean, self.obs_mean - torch.tensor(OBS_LOW))
        clip = max(10.0, math.ceil((farthest * torch.rsqrt(self.obs_var + NORM_EPSILON)).max().item()))
        stats = {"obs_mean": self.obs_mean.tolist(), "obs_var": self.obs_var.tolist()}
        return {**stats, "clip_obs": clip, "epsilon": NORM_EPSILON}


class OnnxNet:
    """A model of ONNX, operation by operation."""

    def __init__(self, onnx):
        self.onnx, self.nodes, self.numbers = onnx, [], []

    def number(self, values) -> str:
        """A constant. -> its name"""
        array = values.detach().numpy() if isinstance(values, torch.Tensor) else values
        self.numbers.append(
            self.onnx.numpy_helper.from_array(np.array(array, np.float32), f"number{len(self.numbers)}")
        )
        return self.numbers[-1].name

    def add(self, operation: str, *inputs: str, output: str | None = None, **attributes) -> str:
        """-> the name of what comes out"""
        output = output or f"x{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(operation, inputs, [output], **attributes))
        return output

    def model(self, x: str):
        """The model that gives x, kept within the box of inputs."""
        self.add("Min", self.add("Max", x, self.number(ACTION_LOW)), self.number(ACTION_HIGH), output="actions")
        helper, kind = self.onnx.helper, self.onnx.TensorProto.FLOAT
        obs = helper.make_tensor_value_info("obs", kind, ["batch", OBS_SIZE])
        actions = helper.make_tensor_value_info("actions", kind, ["batch", len(ACTION_LOW)])
        graph = helper.make_graph(self.nodes, "driver", [obs], [actions], self.numbers)
        # Old versions on purpose: every runtime in a browser knows them.
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        self.onnx.checker.check_model(model)
        return model


def mlp(hidden: int, outputs: int, output_gain: float) -> nn.Sequential:
    """Two hidden layers of ReLU, orthogonal weights."""
    net = nn.Sequential(
        nn.Linear(OBS_SIZE, hidden), nn.ReLU(True), nn.Linear(hidden, hidden), nn.ReLU(True), nn.Linear(hidden, outputs)
    )
    for layer, gain in zip(net[::2], (math.sqrt(2), math.sqrt(2), output_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return net


def gaussian_logprob(noise, log_std):
    """log N(mean + std * noise; mean, std), summed over the action. By hand: torch.distributions takes six times as long."""
    return -0.5 * (noise * noise).sum(-1) - log_std.sum() - 0.5 * noise.shape[-1] * math.log(2 * math.pi)


def gaussian_entropy(log_std):
    return log_std.sum() + 0.5 * len(log_std) * math.log(2 * math.pi * math.e)


def merge_moments(a, b):
    """Mean, variance and count of two sets taken together (Chan et al.)."""
    (mean_a, var_a, count_a), (mean_b, var_b, count_b) = a, b
    count = count_a + count_b
    delta = mean_b - mean_a
    var = (var_a * count_a + var_b * count_b + delta * delta * (count_a * count_b / count)) / count
    return mean_a + delta * (count_b / count), var, count


class RewardScaler:
    """Rewards divided by the running deviation of the discounted return, so that the critic's targets are of order 1.

    Only what the networks learn from is scaled; every metric shows raw rewards. Every track has a deviation of its own: a
    metre of a short track pays more than one of a long track, and would otherwise be all that a common driver cares for.
    """

    def __init__(self, num_envs: int, gamma: float, num_tracks: int = 1, first_car: int = 0):
        self.gamma = gamma
        self.returns = np.zeros(num_envs)
        # The cars of each track, as the environment has them.
        self.tracks = [slice((i - first_car) % num_tracks, None, num_tracks) for i in range(num_tracks)]
        self.moments = [(0.0, 1.0, 1e-4)] * num_tracks  # mean, variance, count

    def update(self, rewards, done, gather=lambda value: [value]) -> None:
        """Take in what happened: (T, N) each; and through `gather` what happened to the cars of other processes."""
        moments = np.empty((len(rewards), len(self.tracks), 3))
        for t in range(len(rewards)):
            self.returns = self.returns * self.gamma + rewards[t]
            for i, cars in enumerate(self.tracks):
                some = self.returns[cars]
                moments[t, i] = some.mean(), some.var(), len(some)
            self.returns[done[t]] = 0.0  # the next episode begins with nothing
        everyones = np.stack(gather(moments)).tolist()
        for t in range(len(rewards)):
            for i in range(len(self.tracks)):
                for theirs in everyones:
                    self.moments[i] = merge_moments(self.moments[i], theirs[t][i])

    @property
    def deviation(self) -> np.ndarray:
        """Of every car's discounted return (N,)"""
        deviation = np.empty_like(self.returns)
        for cars, (_, variance, _) in zip(self.tracks, self.moments, strict=True):
            deviation[cars] = math.sqrt(variance + 1e-8)
        return deviation

    def get_state(self) -> dict:
        return {"returns": self.returns.copy(), "moments": np.array(self.moments, dtype=np.float64)}

    def set_state(self, state: dict) -> None:
        self.returns = np.array(state["returns"])
        self.moments = [tuple(row) for row in np.asarray(state["moments"]).tolist()]


# ======================================================================================================================
# Rollout
# ======================================================================================================================


class Storage:
    """One rollout. `obs` has a row more: the observation after the last tick, which the last value needs."""

    def __init__(self, steps: int, num_envs: int):
        self.obs = torch.zeros(steps + 1, num_envs, OBS_SIZE)  # (T + 1, N, 14)
        self.actions = torch.zeros(steps, num_envs, len(ACTION_LOW))  # (T, N, 3)
        self.logprobs = torch.zeros(steps, num_envs)  # (T, N), and so are the others
        self.rewards = np.zeros((steps, num_envs))
        self.terminated = np.zeros((steps, num_envs), bool)
        self.truncated = np.zeros((steps, num_envs), bool)
        self.final_obs: list[tuple[int, np.ndarray, np.ndarray]] = []  # (tick, cars, observations) of ended episodes


@torch.no_grad()
def rollout(agent: Agent, envs, storage: Storage, stats: RaceStats, generator, clock: Clock, recover=None) -> None:
    """Drive all cars for T ticks from storage.obs[-1], and leave everything the update needs in storage.

    A bridge that fails in a step has not given it: recover(error) brings observations of new episodes, or raises. What the
    cars were doing ends before that step, as truncated, and the tick is driven anew: no step is made up.
    """
    storage.obs[0] = storage.obs[-1].clone()
    storage.final_obs.clear()
    steps, num_envs = storage.rewards.shape
    noise = torch.randn(steps, num_envs, len(ACTION_LOW), generator=generator)
    std = agent.log_std.exp()
    t = 0
    while t < steps:
        with clock("policy"):
            storage.actions[t] = agent.actor(agent.normalize(storage.obs[t])) + std * noise[t]
            actions = storage.actions[t].numpy()
        try:
            with clock("environment"):
                obs, rewards, terminated, truncated, infos = envs.step(actions)
        except BridgeError as error:
            if recover is None:
                raise
            if t > 0:
                cars = np.flatnonzero(~(storage.terminated[t - 1] | storage.truncated[t - 1]))
                storage.final_obs.append((t - 1, cars, storage.obs[t, cars].numpy()))
                storage.truncated[t - 1, cars] = True
            storage.obs[t] = torch.from_numpy(recover(error))
            continue
        with clock("logging"):
            stats.step(infos)
        storage.obs[t + 1] = torch.from_numpy(obs)
        storage.rewards[t], storage.terminated[t], storage.truncated[t] = rewards, terminated, truncated
        if "final_obs" in infos:
            cars = np.flatnonzero(infos["_final_obs"])
            storage.final_obs.append((t, cars, np.stack(infos["final_obs"][cars])))
        t += 1
    storage.logprobs[:] = gaussian_logprob(noise, agent.log_std)


@torch.no_grad()
def estimate_values(agent: Agent, storage: Storage):
    """values (T, N) of the observations, and next_values (T, N) of what followed: at an episode's end, its true last one."""
    values = agent.value(storage.obs).numpy().astype(np.float64)
    next_values = values[1:].copy()
    for t, cars, obs in storage.final_obs:
        next_values[t, cars] = agent.value(torch.from_numpy(obs)).numpy()
    return values[:-1], next_values


# ======================================================================================================================
# Learning
# ======================================================================================================================


def compute_gae(rewards, values, next_values, terminated, truncated, gamma: float, gae_lambda: float):
    """Generalised advantage estimation. All arrays (T, N) -> advantages, returns (T, N)

    A terminated episode has no future, so nothing is expected after it. A truncated one would have gone on: the critic's
    value of its last observation stands for the rest. Both end the sum of later errors: they belong to another episode.
    """
    errors = rewards + gamma * next_values * ~terminated - values
    carry = gamma * gae_lambda * ~(terminated | truncated)
    advantages = np.zeros_like(errors)
    advantage = np.zeros_like(errors[0])
    for t in reversed(range(len(errors))):
        advantage = errors[t] + carry[t] * advantage
        advantages[t] = advantage
    return advantages, advantages + values


def ppo_loss(logprobs, old_logprobs, advantages, clip_coef: float):
    """The clipped objective: gain from more probable good actions counts up to a ratio of 1 + clip_coef, and vice versa.

    -> loss, and the log of the ratios (B,)
    """
    advantages = (advantages - advantages.mean()) / (advantages.std(unbiased=False) + 1e-8)
    logratio = logprobs - old_logprobs
    ratio = logratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages
    return -torch.minimum(unclipped, clipped).mean(), logratio


def make_optimizers(agent: Agent, learning_rate: float) -> dict[str, torch.optim.Adam]:
    """An Adam for the actor and one for the critic; fused where this torch can do that on this device."""

    def adam(parameters):
        vector = as_one_vector(list(parameters))
        with contextlib.suppress(RuntimeError):
            return torch.optim.Adam([vector], lr=learning_rate, eps=1e-5, fused=True)
        return torch.optim.Adam([vector], lr=learning_rate, eps=1e-5)

    return {"actor": adam([agent.log_std, *agent.actor.parameters()]), "critic": adam(agent.critic.parameters())}


def as_one_vector(parameters: list[nn.Parameter]) -> nn.Parameter:
    """A vector of which the parameters, and their gradients, become parts: what is done to it is done to all, in one go."""
    vector = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    vector.grad = torch.zeros_like(vector)
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, value, grad in zip(parameters, vector.data.split(sizes), vector.grad.split(sizes), strict=True):
        parameter.data, parameter.grad = value.view_as(parameter), grad.view_as(parameter)
    return vector


def update(
    agent: Agent, optimizers, batch: dict[str, torch.Tensor], args: Args, generator: torch.Generator, team: Team
) -> dict:
    """Some epochs of minibatch steps on one rollout. batch: tensors (B, ...) -> metrics

    Actor and critic share no weights, so each has a loss, an optimiser and a clipped gradient of its own. In a process alone
    the two learn at the same time, on a core each. The shuffles are drawn beforehand: the numbers do not depend on who is
    faster. Of several processes each has one core and takes its share of every minibatch (and normalises the advantages of
    that share); both gradients are averaged over all processes at every step.
    """
    samples = len(batch["obs"])
    orders = [torch.randperm(samples, generator=generator) for _ in range(args.update_epochs)]
    minibatches = max(1, round(samples * team.size / args.minibatch_size))
    actor = update_actor(agent, optimizers["actor"], batch, orders, minibatches, args, team)
    critic = update_critic(agent, optimizers["critic"], batch, orders, minibatches, args)
    if team.size == 1:
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=[args.threads]) as other_core:
            on_other_core = other_core.submit(learn_to_the_end, critic)
            metrics = learn_to_the_end(actor) | on_other_core.result()
    else:
        metrics = learn_in_step(team, actor, critic)
    metrics["train/loss"] = metrics["train/policy_gradient_loss"] + metrics["train/value_loss"]
    metrics["train/loss"] += args.ent_coef * metrics["train/entropy_loss"]
    return metrics


def learn_to_the_end(learner) -> dict:
    """Let one network learn. A learner yields every gradient before it takes the step."""
    while True:
        try:
            next(learner)
        except StopIteration as end:
            return end.value


def learn_in_step(team: Team, *learners) -> dict:
    """Let networks learn one minibatch at a time, from the gradients of all processes."""
    metrics = {}
    while learners:
        gradients = []
        for learner in learners:
            try:
                gradients.append(next(learner))
            except StopIteration as end:
                metrics |= end.value
                learners = tuple(other for other in learners if other is not learner)
        if gradients:
            team.average(*gradients)
    return metrics


def update_actor(agent: Agent, optimizer, batch, orders, minibatches: int, args: Args, team: Team):
    """The policy's share of an update, as a learner."""
    names = ("obs", "actions", "logprobs", "advantages")
    policy_losses, logratios = [], []
    for minibatch in shuffled(batch, names, orders, minibatches):
        mb_obs, mb_actions, mb_logprobs, mb_advantages = minibatch
        noise = (mb_actions - agent.actor(mb_obs)) * torch.exp(-agent.log_std)
        logprobs = gaussian_logprob(noise, agent.log_std)
        policy_loss, logratio = ppo_loss(logprobs, mb_logprobs, mb_advantages, args.clip_coef)
        policy_losses.append(policy_loss.detach())
        logratios.append(logratio.detach())
        if args.target_kl is not None:
            moved = approx_kl(logratios[-1]).reshape(1)
            team.average(moved)  # all stop, or none
            if moved > args.target_kl:
                break  # before the step that would take the policy farther
        yield from learn(optimizer, policy_loss - args.ent_coef * gaussian_entropy(agent.log_std), args.max_grad_norm)
    logratio = torch.cat(logratios)
    return {
        "train/policy_gradient_loss": torch.stack(policy_losses).mean().item(),
        "train/entropy_loss": -gaussian_entropy(agent.log_std).item(),
        "train/approx_kl": approx_kl(logratio).item(),
        "train/clip_fraction": (logratio.exp() - 1).abs().gt(args.clip_coef).float().mean().item(),
        "train/std": agent.log_std.exp().mean().item(),
        "train/clip_range": args.clip_coef,
        "train/learning_rate": optimizer.param_groups[0]["lr"],
    }


def update_critic(agent: Agent, optimizer, batch, orders, minibatches: int, args: Args):
    """The critic's share of an update, as a learner."""
    value_losses = []
    for mb_obs, mb_returns in shuffled(batch, ("obs", "returns"), orders, minibatches):
        value_loss = 0.5 * (agent.critic(mb_obs).squeeze(-1) - mb_returns).square().mean()
        value_losses.append(value_loss.detach())
        yield from learn(optimizer, value_loss, args.max_grad_norm)
    return {"train/value_loss": torch.stack(value_losses).mean().item()}


def shuffled(batch, names, orders, minibatches: int):
    """The rollout in minibatches of equal size, in a new order every epoch: tensors of `names`, a tuple at a time."""
    for order in orders:
        yield from zip(*(torch.tensor_split(batch[name][order], minibatches) for name in names), strict=True)


def learn(optimizer, loss, max_grad_norm: float):
    """One step down the gradient, which is scaled down to max_grad_norm if it is longer. Yields the gradient beforehand."""
    (parameters,) = optimizer.param_groups[0]["params"]
    parameters.grad.zero_()
    loss.backward()
    yield parameters.grad
    parameters.grad.mul_((max_grad_norm / (parameters.grad.norm() + 1e-6)).clamp(max=1.0))
    optimizer.step()


def approx_kl(logratio):
    """How far the policy has moved from the one that drove: an estimate of their divergence, never negative."""
    return (logratio.exp() - 1 - logratio).mean()


def check_finite(agent: Agent, metrics: dict, update: int) -> None:
    """Learning that has blown up must not go on, nor reach a checkpoint."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise FloatingPointError(f"{name} has become {value} in update {update}")
    for name, value in agent.state_dict().items():
        if not torch.isfinite(value).all():
            raise FloatingPointError(f"the weights {name} are no finite numbers after update {update}")


def explained_variance(values, returns) -> float:
    """1: the critic foresaw everything; 0: no better than a constant."""
    variance = returns.var()
    return float("nan") if variance == 0 else float(1 - (returns - values).var() / variance)


# ======================================================================================================================
# Pictures
# ======================================================================================================================


def draw_best_lap(episodes: list[Episode], actions: np.ndarray, config: dict, with_replay: bool):
    """Pictures of the fastest lap among the episodes: -> (H, W, 3), GIF or None. Nothing if no lap was driven here.

    The lap is driven again on the embedded engine, which knows where the car is (the bridge does not tell).
    """
    laps = [(ticks, i, k) for i, e in enumerate(episodes) for k, ticks in enumerate(e.lap_ticks)]
    if not laps or not all(e.from_line for e in episodes):
        return None, None
    ticks, car, k = min(laps)
    end = episodes[car].lap_ends[k]
    painter, x, y, heading, speed = drive_again(episodes[car].track, config, actions[:end, car])
    lap = slice(end - ticks, end + 1)
    way = np.stack([x[lap], y[lap]], axis=1)
    title = f"{painter.track.name}  {ticks / TICKS_PER_SECOND:.3f} s"
    gif = lap_replay(painter.smaller(480), way, heading[lap], speed[lap]) if with_replay else None
    return racing_line(painter, way, speed[lap], title), gif


# ======================================================================================================================
# Checkpoint
# ======================================================================================================================


def pack(value):
    """NumPy arrays as tensors, through dicts: a checkpoint holds tensors and plain values only, so it can load without code."""
    if isinstance(value, dict):
        return {key: pack(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        if value.dtype == np.uint64:  # which older versions of torch do not save
            return {"uint64": torch.from_numpy(value.view(np.int64).copy())}
        return torch.from_numpy(value.copy())
    return value


def unpack(value):
    if isinstance(value, dict):
        if set(value) == {"uint64"}:
            return value["uint64"].numpy().view(np.uint64)
        return {key: unpack(item) for key, item in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value


def join(states: list[dict | None]) -> dict | None:
    """The states of all processes as that of the whole run: the arrays over cars one after the other."""
    if states[0] is None:
        return None
    return {
        name: states[0][name] if name in NOT_OVER_CARS else np.concatenate([state[name] for state in states])
        for name in states[0]
    }


def share_of(state: dict, team: Team) -> dict:
    """The other way round: what of the whole run belongs to this process."""

    def mine(array):
        count = len(array) // team.size
        return array[team.rank * count : (team.rank + 1) * count]

    return {name: value if name in NOT_OVER_CARS else mine(value) for name, value in state.items()}


def write_whole(path: Path, write) -> bool:
    """A file whole or not at all: write(file) to one beside it, then into place. -> whether it worked

    A disk that is full must not cost the run, nor the file there is.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        warn(
            f"WARNING: {path} could not be written ({error.strerror or error}); the one before it is untouched. "
            "Make room and training will try again."
        )
        return False
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True


def save_checkpoint(path: Path, checkpoint: dict) -> bool:
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    return write_whole(path, lambda file: file.write(buffer.getbuffer()))


def load_checkpoint(path: Path, prefer: str = "checkpoint.pt") -> dict:
    """A checkpoint of this trainer from a file or a run folder. No code in it is run. ValueError if it is not one."""
    path = Path(path)
    if path.is_dir():
        names = [prefer, "checkpoint.pt", "best.pt"]
        found = [path / name for name in names if (path / name).exists()]
        if not found:
            raise ValueError(f"the folder {path} holds no checkpoint (yet); give a run folder or a .pt file")
        path = found[0]
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a checkpoint (.pt) or a run folder, e.g. {Args.run_dir}/NAME")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds: truncated, no checkpoint at all, a pickle with code in it
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{path} is no checkpoint, or a damaged one ({reason}). Nothing in it was run. "
            f"Take another: the run folder's {'best.pt' if path.name != 'best.pt' else 'checkpoint.pt'}, say"
        ) from error
    if not isinstance(checkpoint, dict) or "algorithm" not in checkpoint or "format" not in checkpoint:
        raise ValueError(f"{path} is a file of torch, but not a checkpoint of {ALGORITHM}_racer.py")
    if checkpoint["algorithm"] != ALGORITHM:
        raise ValueError(
            f"{path} is a checkpoint of {checkpoint['algorithm']}; load it with {checkpoint['algorithm']}_racer.py"
        )
    if checkpoint["format"] != CHECKPOINT_FORMAT:
        newer = isinstance(checkpoint["format"], int) and checkpoint["format"] > CHECKPOINT_FORMAT
        raise ValueError(
            f"{path} has format {checkpoint['format']!r}, this program knows {CHECKPOINT_FORMAT}: "
            + ("a newer one wrote it; update" if newer else "an older one wrote it; train anew")
        )
    lacking = [key for key in CHECKPOINT_KEYS if key not in checkpoint]
    settings = {field.name for field in dataclasses.fields(Args)} - set(NOT_SETTINGS)
    if not lacking and set(checkpoint["args"]) != settings:
        lacking = sorted(set(checkpoint["args"]) ^ settings)
    if lacking:
        raise ValueError(f"{path} is no whole checkpoint of this version: {', '.join(lacking)} missing or unknown")
    return checkpoint


def restore_agent(checkpoint: dict, path: Path) -> Agent:
    """The driver in a checkpoint."""
    agent = Agent(hidden=int(checkpoint["args"]["hidden"]))
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError as error:
        raise ValueError(f"{path} holds networks of other sizes than this program makes: {error}") from error
    return agent


def saved_args(args: Args) -> dict:
    """Args as plain values, for a checkpoint or JSON; files by their full path, so that a run can go on from elsewhere."""

    def plain(value):
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        if isinstance(value, Path) or (isinstance(value, str) and value.lower().endswith(".json")):
            return str(Path(value).resolve())
        return value

    return {name: plain(value) for name, value in dataclasses.asdict(args).items() if name not in NOT_SETTINGS}


def resumed_args(given: Args, saved: dict) -> Args:
    """The settings of the run that goes on. Only how long it runs and what it leaves behind may change."""
    settings = dict(saved)
    for name in ("track_id", "bridge_url"):
        settings[name] = tuple(settings[name])
    for name in ("config_path", "run_dir"):
        settings[name] = Path(settings[name]) if settings[name] is not None else None
    may_change = {*MAY_CHANGE, *(["bridge_url"] if settings["bridge_url"] else [])}  # the game may have moved
    asked = saved_args(given)
    for name in given.given - set(NOT_SETTINGS):
        if asked[name] != saved[name] and name not in may_change:
            raise ValueError(
                f"--{name.replace('_', '-')} is {asked[name]}, but the run to resume has {saved[name]}, and that cannot change "
                "in mid-run; leave it out, or start a new run"
            )
        settings[name] = getattr(given, name)
    return Args(**settings, resume=given.resume)


# ======================================================================================================================
# The run: signals, folder
# ======================================================================================================================


class Stop:
    """Ctrl+C and SIGTERM ask for an orderly end: the update under way is finished, a checkpoint written. Twice: at once.

    (One after the other is not twice: torchrun passes on a Ctrl+C, which its processes have got already, as SIGTERM.)
    """

    def __init__(self, silent: bool = False):
        self.silent = silent
        self.signal: int | None = None
        self._before: dict = {}

    def __enter__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not in the main thread: somebody else has the signals
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number, _frame) -> None:
        if self.signal == number:
            raise KeyboardInterrupt
        self.signal = self.signal or number
        if not self.silent:
            warn("\nstopping: finishing this update, then saving (once more to stop at once)")

    def wait(self, seconds: float) -> bool:
        """Sleep, but not through a signal. -> whether there was none"""
        until = time.monotonic() + seconds
        while self.signal is None and time.monotonic() < until:
            time.sleep(0.05)
        return self.signal is None

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)


def launch_name() -> str:
    """What stays the same when torchrun starts its processes again after one has died."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}-{socket.gethostname()}-{os.getppid()}"


def find_run(args: Args) -> tuple[Path | None, dict | None]:
    """The folder and the checkpoint to go on from: those of --resume, or of this very run before torchrun began it again."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if args.resume is not None:
        folder = args.resume if args.resume.is_dir() else args.resume.parent
        if again and (folder / "checkpoint.pt").exists():
            checkpoint = load_checkpoint(folder)
            if checkpoint.get("launch") == launch_name():  # not the one from before --resume
                return folder, checkpoint
        checkpoint = load_checkpoint(args.resume)
        if args.resume.is_file() and not (folder / "args.json").exists():
            raise ValueError(
                f"{args.resume} lies in {folder}, which is no run folder (it has no args.json), and the run would write its files "
                "there; put the checkpoint into a folder of its own and give --resume that folder"
            )
        return folder, checkpoint
    folder = newest_of_this_launch(args.run_dir) if again else None
    return folder, load_checkpoint(folder) if folder and (folder / "checkpoint.pt").exists() else None


def newest_of_this_launch(run_dir: Path) -> Path | None:
    folders = {}
    for facts in run_dir.glob("*/args.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(facts.read_text())["launch"] == launch_name():
                folders[facts.stat().st_mtime] = facts.parent
    return folders[max(folders)] if folders else None


def make_run_folder(args: Args) -> Path:
    """runs/NAME with the settings, the versions and the commit that made it."""
    tracks = "-".join(Path(track).stem for track in args.track_id)
    name = args.run_name or f"{ALGORITHM}-{tracks}-s{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = args.run_dir / name
    if args.run_name and (Path(name).name != name or name == ".."):
        raise ValueError(f"--run-name {name!r} is no plain name; where the folder goes, --run-dir says")
    if args.run_name and folder.is_dir() and any(folder.iterdir()):
        why = f"{folder} holds other files: empty it"
        if (folder / "checkpoint.pt").exists():
            why = f"{folder} already holds a run; go on with it (--resume {folder})"
        elif (folder / "args.json").exists():
            why = f"{folder} holds a run without a checkpoint, which may have just begun; remove it"
        raise ValueError(f"{why}, or give another --run-name")
    number = 2
    while not args.run_name and folder.exists():
        folder, number = args.run_dir / f"{name}-{number}", number + 1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "args.json").write_text(json.dumps({"args": saved_args(args), **provenance()}, indent=2))
    except OSError as error:
        raise ValueError(
            f"the run folder {folder} cannot be written ({error.strerror}); choose another --run-dir"
        ) from error
    return folder


def check_writable(folder: Path) -> None:
    probe = folder / f"checkpoint.pt.{os.getpid()}.tmp"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"the run folder {folder} cannot be written ({error.strerror}); nothing would be saved"
        ) from error


def provenance() -> dict:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    versions |= {"gymnasium": gymnasium.__version__, "system": platform.platform()}
    try:
        here = Path(__file__).resolve().parent
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
        commit = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=5).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": commit,
        "versions": versions,
        "processes": processes_of_the_run(),
        "launch": launch_name(),
    }


# ======================================================================================================================
# Train
# ======================================================================================================================


class Run:
    """Everything a run consists of, and its way into a checkpoint and back. What happens with it stands in `train`."""

    def __init__(self, args: Args, team: Team, stop: Stop):
        torch.set_num_threads(args.threads)
        torch.manual_seed(args.seed)
        self.args, self.team, self.stop = args, team, stop
        self.clock, self.session_began = Clock(), time.perf_counter()
        self.generator = torch.Generator().manual_seed(args.seed + team.rank * RANK_SEED_STRIDE)
        cars = args.num_envs // team.size  # of this process
        first_car = cars * team.rank
        urls = (
            args.bridge_url[team.rank :: team.size] or args.bridge_url[team.rank % max(len(args.bridge_url), 1) :][:1]
        )
        env = {"track_id": args.track_id, "config_path": args.config_path, "bridge_url": urls or None}
        # The bridge first: if it cannot serve, say so before anything else is made.
        with team.together():
            self.envs = RacerVectorEnv(cars, **env, start=args.start, stagger=True, first_car=first_car)
            try:
                self.envs.check()
                self.eval_envs = RacerVectorEnv(len(args.track_id), **env) if team.first else None
            except BaseException:
                self.envs.close()
                raise
        self.agent = Agent(args.hidden, args.init_std, args.init_throttle)
        self.agent.load_state_dict(team.share(self.agent.state_dict))  # other machines may round otherwise
        self.optimizers = make_optimizers(self.agent, args.learning_rate)
        self.scaler = RewardScaler(cars, args.gamma, len(args.track_id), first_car)
        self.storage = Storage(args.rollout_steps, cars)
        self.stats = RaceStats(cars, self.envs.config["episode"]["maxSteps"], args.start == "grid")
        self.steps = 0
        self.bridge_faults = self.faults_in_a_row = 0
        self.seconds_before = 0.0  # in sessions before this one
        self.best = {"score": -math.inf, "step": 0, "episodes": []}
        self.best_laps: tuple[list[Episode], np.ndarray] | None = None  # of this session, for pictures
        self.published_beaten: dict | None = None

    def begin(self) -> None:
        obs, infos = self.envs.reset(seed=self.args.seed)
        self.storage.obs[-1] = torch.from_numpy(obs)
        self.stats.begin(infos)

    def open_folder(self, resumed: bool) -> None:
        args, folder = self.args, self.folder
        if resumed:
            check_writable(folder)
        for name in ("checkpoint.pt", "best.pt", "buffer-*.npz"):  # of a run that was killed while it wrote
            for leftover in folder.glob(f"{name}.*.tmp"):
                with contextlib.suppress(OSError):
                    leftover.unlink()
        self.logger = MetricsLogger(folder, self.steps if resumed else None, tensorboard=args.tensorboard)
        rows = [f"| {name} | {value} |" for name, value in saved_args(args).items()]
        self.logger.text("hyperparameters", "\n".join(["| | |", "|-|-|", *rows]))
        self.progress = Progress(args.total_timesteps, self.steps)
        where = f" in the game at {', '.join(args.bridge_url)}" if args.bridge_url else ""
        going_on = f", going on from step {self.steps:,}" if resumed else ""
        by = f", {self.team.size} processes" if self.team.size > 1 else ""
        self.progress.say(f"{folder}: {args.num_envs} cars on {', '.join(args.track_id)}{where}{by}{going_on}")

    @property
    def seconds(self) -> float:
        """How long the run has taken, all sessions together."""
        return self.seconds_before + time.perf_counter() - self.session_began

    @property
    def iteration(self) -> int:
        """Iterations there have been."""
        return self.steps // self.args.steps_per_iteration

    @property
    def finished(self) -> bool:
        return self.iteration >= self.args.num_iterations

    def due(self, every: int) -> bool:
        """Whether the last iteration went past a multiple of so many steps, or was the last."""
        return self.finished or self.steps // every > (self.steps - self.args.steps_per_iteration) // every

    def meet(self, metrics: dict[str, float]) -> tuple[dict[str, float], list[dict], int | None]:
        """After an iteration all processes tell each other how it went. -> mean metrics, the others' news, a signal to stop"""
        weights = torch.cat([p.detach().flatten() for p in self.agent.parameters()]).numpy()
        news = None if self.team.first else self.stats.news()
        mine = {"metrics": metrics, "news": news, "signal": self.stop.signal, "faults": self.bridge_faults}
        everyones = self.team.gather({**mine, "weights": zlib.crc32(weights)})
        if len({theirs["weights"] for theirs in everyones}) > 1:
            raise TeamError(
                f"the processes' weights have come apart by step {self.steps:,}: are these machines of one kind?"
            )
        metrics = {name: float(np.mean([theirs["metrics"][name] for theirs in everyones])) for name in metrics}
        if self.args.bridge_url:
            metrics["racer/bridge_faults"] = sum(theirs["faults"] for theirs in everyones)
        signals = [theirs["signal"] for theirs in everyones if theirs["signal"] is not None]
        return metrics, [theirs["news"] for theirs in everyones[1:]], signals[0] if signals else None

    def reconnect(self, envs: RacerVectorEnv, error: BridgeError):
        """After a bridge fault: connect again, as often in a row as --bridge-retries says. -> observations, infos; or raises"""
        self.bridge_faults += 1
        if envs.under_way:  # it has driven since the last time
            self.faults_in_a_row = 0
        while True:
            self.faults_in_a_row += 1
            pause = min(2 ** (self.faults_in_a_row - 1), LONGEST_PAUSE_S)
            if self.faults_in_a_row > self.args.bridge_retries or not self.stop.wait(pause):
                raise error
            which = f"retry {self.faults_in_a_row} of {self.args.bridge_retries}"
            warn(f"\nWARNING: {error}\nConnecting again ({which})")
            try:
                return envs.reconnect()
            except BridgeError as again:
                error = again

    def recover(self, error: BridgeError) -> np.ndarray:
        """For the rollout: new episodes for all cars, or the error again."""
        obs, infos = self.reconnect(self.envs, error)
        self.stats.interrupt(infos)
        return obs

    def log(self, metrics: dict[str, float], others_news: list[dict]) -> None:
        self.stats.log(self.logger, others_news)
        metrics = {**metrics, "time/fps": self.steps / self.seconds}
        for name, seconds in self.clock.seconds.items():
            metrics[f"time/{name}_sec"] = seconds
        for name, value in metrics.items():
            self.logger.record(name, value)

    def save(self, name: str = "checkpoint.pt") -> bool:
        with self.clock("checkpoints"):
            state = self.get_state()
            return self.team.share(save_checkpoint, self.folder / name, state)

    def get_state(self) -> dict:
        """The whole run, which all processes put together for the first one."""
        mine = {
            "scaler": self.scaler.get_state(),
            "stats": self.stats.get_state(),
            "generator": self.generator.get_state(),
        }
        mine["envs"] = None if self.args.bridge_url else self.envs.get_state()
        mine["faults"] = self.bridge_faults
        everyones = self.team.collect(mine)
        if everyones is None:
            return None
        whole = {name: pack(join([theirs[name] for theirs in everyones])) for name in ("scaler", "stats", "envs")}
        return {
            "algorithm": ALGORITHM,
            "format": CHECKPOINT_FORMAT,
            "args": saved_args(self.args),
            "agent": {name: value.clone() for name, value in self.agent.state_dict().items()},
            "optimizers": {name: copy.deepcopy(optimizer.state_dict()) for name, optimizer in self.optimizers.items()},
            **whole,
            "config": self.envs.config,
            "generators": [theirs["generator"] for theirs in everyones],
            "counters": {
                "iteration": self.iteration,
                "steps": self.steps,
                "seconds": self.seconds,
                "bridge_faults": sum(theirs["faults"] for theirs in everyones),
            },
            "best": self.best,
            "published_beaten": self.published_beaten,
            "launch": launch_name(),
        }

    def set_state(self, checkpoint: dict, _folder: Path) -> None:
        if checkpoint["config"] != self.envs.config:
            raise ValueError(
                f"the rewards or limits in {self.args.config_path or DEFAULT_CONFIG_PATH} are not those the run to resume "
                f"was begun with ({json.dumps(checkpoint['config'])}); put them back, or start a new run"
            )
        try:
            self.agent.load_state_dict(checkpoint["agent"])
            for name, optimizer in self.optimizers.items():
                optimizer.load_state_dict(checkpoint["optimizers"][name])
            counters, team = checkpoint["counters"], self.team
            self.steps, self.seconds_before = counters["steps"], counters["seconds"]
            self.bridge_faults = counters["bridge_faults"] if team.first else 0
            self.best, self.published_beaten = checkpoint["best"], checkpoint["published_beaten"]
            self.scaler.set_state(share_of(unpack(checkpoint["scaler"]), team))
            self.stats.set_state(share_of(unpack(checkpoint["stats"]), team))
            if not team.first:
                self.stats.episodes.clear()  # the first one has them
            if len(checkpoint["generators"]) == team.size:
                self.generator.set_state(checkpoint["generators"][team.rank])
            else:
                self.generator.manual_seed(self.args.seed + team.rank * RANK_SEED_STRIDE + self.steps)
                if team.first:
                    say(f"going on with {team.size} instead of {len(checkpoint['generators'])} processes: as good, but with other "
                        "random numbers, so not bit for bit")  # fmt: skip
            if checkpoint["envs"] is None:  # the real game begins new episodes
                self.stats.forget_episodes()
                self.scaler.returns[:] = 0
                self.begin()
            else:
                self.storage.obs[-1] = torch.from_numpy(self.envs.set_state(share_of(unpack(checkpoint["envs"]), team)))
        except BridgeError:
            raise
        except (KeyError, RuntimeError, TypeError) as error:
            raise ValueError(f"this checkpoint does not fit this program or its settings: {error!r}") from error

    def close(self) -> None:
        self.envs.close()
        if self.eval_envs is not None:
            self.eval_envs.close()
        if hasattr(self, "logger"):
            self.logger.close()


def start_run(args: Args, team: Team, stop: Stop) -> Run:
    """A new run, or the one in --resume as it stood."""
    folder, checkpoint = team.share(find_run, args)
    if checkpoint is not None:
        args = resumed_args(args, checkpoint["args"])
    run = Run(args, team, stop)
    try:
        if checkpoint is None:
            folder = folder or team.share(make_run_folder, args)
            with team.together():
                run.begin()
        else:
            with team.together():
                run.set_state(checkpoint, folder)
        run.folder = folder
        team.share(run.open_folder, checkpoint is not None)
    except BaseException:
        run.close()
        raise
    return run


def train(args: Args) -> dict:
    """A whole run: drive, learn, evaluate, save, until the steps are done or somebody stops it. -> what was reached"""
    with (
        Team(args.bridge_retries) as team,
        Stop(silent=not team.first) as stop,
        contextlib.closing(start_run(args, team, stop)) as run,
    ):
        args, stopped, saved = run.args, None, True
        try:
            while not run.finished and stopped is None:
                metrics, others_news, stopped = run.meet(learn_once(run))
                if team.first:
                    with run.clock("logging"):
                        run.log(metrics, others_news)
                if run.due(args.eval_every):
                    best_before = run.best
                    with run.clock("evaluation"):
                        is_best = team.share(evaluate_run, run)
                    if is_best and not run.save("best.pt"):
                        run.best = best_before  # the best there is on the disk
                if team.first:
                    with run.clock("logging"):
                        run.progress.show(run.steps, run.stats, run.logger.dump(run.steps))
                if run.due(args.checkpoint_every) or stopped is not None:
                    saved = run.save()
            return {**report(run, stopped), "saved": saved}
        except BridgeError as error:
            # As after the last update; what was driven since is lost.
            error.saved_in = run.folder if run.save() else None
            raise
        except (TeamError, FloatingPointError) as error:
            error.folder = run.folder
            raise


def learn_once(run: Run) -> dict[str, float]:
    """One iteration of PPO: rollout, advantages, update. -> metrics"""
    args, agent, storage, clock = run.args, run.agent, run.storage, run.clock
    if args.anneal_lr:
        for optimizer in run.optimizers.values():
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - run.iteration / args.num_iterations)
    with run.team.together():
        rollout(agent, run.envs, storage, run.stats, run.generator, clock, run.recover)
    with clock("learning"):
        values, next_values = estimate_values(agent, storage)
        run.scaler.update(storage.rewards, storage.terminated | storage.truncated, run.team.gather)
        rewards = storage.rewards / run.scaler.deviation
        ends = storage.terminated, storage.truncated
        advantages, returns = compute_gae(rewards, values, next_values, *ends, args.gamma, args.gae_lambda)
        obs = storage.obs[:-1].reshape(-1, OBS_SIZE)
        with torch.no_grad():
            batch = {
                "obs": agent.normalize(obs),
                "actions": storage.actions.reshape(-1, len(ACTION_LOW)),
                "logprobs": storage.logprobs.reshape(-1),
                "advantages": torch.from_numpy(advantages.astype(np.float32)).reshape(-1),
                "returns": torch.from_numpy(returns.astype(np.float32)).reshape(-1),
            }
        metrics = update(agent, run.optimizers, batch, args, run.generator, run.team)
        if run.steps < args.norm_steps:
            agent.update_normalizer(obs, run.team.gather)
    check_finite(agent, metrics, run.iteration + 1)
    run.steps += args.steps_per_iteration
    return {**metrics, "train/explained_variance": explained_variance(values, returns)}


def evaluate_patiently(run: Run, agent: Agent):
    """`evaluate`, and once more if a bridge fails in it, as often as --bridge-retries allows."""
    while True:
        try:
            return evaluate(agent, run.eval_envs, run.args.track_id)
        except BridgeError as error:
            run.reconnect(run.eval_envs, error)


def evaluate_run(run: Run) -> bool:
    """Drive an episode per track without noise, and draw the best lap of the best driver. -> whether that is this one"""
    folder, logger = run.folder, run.logger
    episodes, actions = evaluate_patiently(run, run.agent)
    since_start = run.seconds_before + time.perf_counter() - PROCESS_START_S
    for name, value in eval_metrics(episodes).items():
        logger.record(name, value)
    for episode in episodes:
        run.progress.say(f"{run.steps:>11,} steps  {since_start:5.1f} s  {describe(summarize([episode]))}")
        mark = PUBLISHED_LAP_TICKS.get(episode.track)
        if mark and run.published_beaten is None and min(episode.flying_laps, default=mark) < mark:
            lap = {"track": episode.track, "ticks": min(episode.flying_laps)}
            run.published_beaten = {**lap, "steps": run.steps, "seconds": since_start}
    is_best = score(episodes) > run.best["score"]
    if is_best:
        results = [summarize([episode]) for episode in episodes]
        run.best = {"score": score(episodes), "step": run.steps, "episodes": results}
        run.best_laps = episodes, actions
        show_lap(run, with_replay=False)
    if run.finished:
        if run.best_laps is None and (folder / "best.pt").exists():  # the best driver is of an earlier session
            try:
                best = restore_agent(load_checkpoint(folder / "best.pt"), folder)
                run.best_laps = evaluate_patiently(run, best)
            except ValueError as error:
                warn(f"WARNING: no replay of the best driver: {error}")
        show_lap(run, with_replay=True)
    return is_best


def show_lap(run: Run, with_replay: bool) -> None:
    """The best driver's best lap as a racing line, or as a replay, to TensorBoard and the run folder. Never a reason to stop."""
    if run.best_laps is None:
        return
    try:
        picture, gif = draw_best_lap(*run.best_laps, run.envs.config, with_replay)
        if with_replay and gif is not None:
            run.logger.animation("eval/replay", gif, run.steps)
            (run.folder / "replay.gif").write_bytes(gif)
        elif picture is not None:
            run.logger.picture("eval/racing_line", picture, run.steps)
            save_picture(run.folder / "racing_line.png", picture)
    except Exception as error:  # no Pillow, no room: it is only a picture
        warnings.warn(f"no picture of the best lap ({error!r}); training goes on", stacklevel=2)


def save_picture(path: Path, picture: np.ndarray) -> None:
    from PIL import Image

    Image.fromarray(picture).save(path)


def command() -> str:
    """How this program was started, for telling people how to go on."""
    program, here = shlex.quote(os.path.relpath(__file__)), os.environ.get("LOCAL_WORLD_SIZE")
    if here is None or "WORLD_SIZE" not in os.environ:
        return f"python {program}"
    machines = processes_of_the_run() // int(here)
    more = f"--nnodes={machines} " if machines > 1 else ""
    return f"torchrun {more}--nproc_per_node={here} {program}"


def report(run: Run, stopped: int | None) -> dict:
    """The summary at the end: what was reached, where it is, what to type next."""
    args, folder, clock, finished, seconds = run.args, run.folder, run.clock, run.finished, run.seconds
    reached = {"run_folder": str(folder), "steps": run.steps, "finished": finished, "signal": stopped}
    if not run.team.first:
        return reached
    total = sum(clock.seconds.values())
    in_loop = total - clock.seconds.get("evaluation", 0.0)
    driven = run.steps - run.progress.first_step
    rate = driven / max(in_loop, 1e-9)
    if not driven:
        say(
            f"\nnothing to do: the run is at {run.steps:,} of {args.total_timesteps:,} steps; a larger --total-timesteps extends it"
        )
    waited = time.perf_counter() - PROCESS_START_S
    say(f"\n\n{'done' if finished else 'stopped'}: {run.steps:,} steps in {seconds:.1f} s ({waited:.1f} s since the start of "
        f"the process), {rate:,.0f} steps/s without evaluation")  # fmt: skip
    shares = sorted(clock.seconds.items(), key=lambda item: -item[1])
    say("time      " + ", ".join(f"{name} {s:.1f} s ({s / max(total, 1e-9):.0%})" for name, s in shares))
    if run.best["episodes"]:
        say(f"best      at step {run.best['step']:,}")
        for result in run.best["episodes"]:
            say(f"          {describe(result)}")
    if run.published_beaten:
        beaten = run.published_beaten
        mark, lap = (ticks / TICKS_PER_SECOND for ticks in (PUBLISHED_LAP_TICKS[beaten["track"]], beaten["ticks"]))
        say(f"          first lap under the published driver's {mark:.3f} s: {lap:.3f} s, seen {beaten['seconds']:.1f} s after "
            f"the start of the process, at {beaten['steps']:,} steps")  # fmt: skip
    files = ("best.pt", "checkpoint.pt", "metrics.csv", "racing_line.png", "replay.gif")
    there = [name for name in files if (folder / name).exists()]
    say(f"files     {folder}: {', '.join(there)}")
    if not finished:
        say(f"go on     {command()} --resume {shlex.quote(str(folder))}")
    if "best.pt" in there:
        say(
            f"evaluate  python {shlex.quote(os.path.relpath(__file__))} --evaluate {shlex.quote(str(folder / 'best.pt'))}"
        )
    say(f"look      tensorboard --logdir {shlex.quote(str(folder.parent))}")
    reached |= {"seconds": seconds, "steps_per_sec": rate, "clock": dict(clock.seconds)}
    return {**reached, "best": run.best, "published_beaten": run.published_beaten}


# ======================================================================================================================
# Evaluate or export a checkpoint, and the command line
# ======================================================================================================================


def evaluate_checkpoint(args: Args) -> list[dict]:
    """`--evaluate`: lap times of a trained driver, on the tracks of its training unless others are given."""
    if args.json:
        try:
            args.json.touch()  # rather now than after the driving
        except OSError as error:
            raise ValueError(f"--json {args.json} cannot be written ({error.strerror}); give another path") from error
    checkpoint = load_checkpoint(args.evaluate, prefer="best.pt")
    agent = restore_agent(checkpoint, args.evaluate)
    tracks = args.track_id if "track_id" in args.given else tuple(checkpoint["args"]["track_id"])
    config_path = args.config_path or checkpoint["args"]["config_path"]
    say(
        f"{args.evaluate}: trained for {checkpoint['counters']['steps']:,} steps on {', '.join(checkpoint['args']['track_id'])}"
    )
    results = []
    for track in tracks:
        envs = RacerVectorEnv(args.episodes, track, config_path, args.bridge_url or None, args.start)
        try:
            episodes, _ = evaluate(agent, envs, [track], seed=args.seed)
        finally:
            envs.close()
        result = summarize(episodes)
        results.append(result)
        say(f"\n{track}: {args.episodes} episodes from {'the grid' if args.start == 'grid' else 'anywhere'}")
        say(f"  laps            {result['laps']} ({result['completion_rate']:.1%} of the episodes with one)")
        say(f"  failures        {result['failures']} (without a lap, or ended before the time)")
        say(f"  first lap       {lap_time(result['first_lap_sec'])} from standing")
        say(
            f"  flying lap      {lap_time(result['flying_lap_sec'])} median, spread {lap_time(result['flying_spread_sec'])}"
        )
        say(f"  best lap        {lap_time(result['best_lap_sec'])}")
        if result["percent_of_best"]:
            known = lap_time(result["percent_of_best"] / 100 * result["flying_lap_sec"])
            say(f"  of the best     {result['percent_of_best']:.1f} %: a flying lap of {known} is known")
        say(f"  reward          {result['mean_reward']:.3f} over {result['mean_length']:,.0f} ticks")
    if len(results) > 1:
        failures, count = sum(result["failures"] for result in results), sum(result["episodes"] for result in results)
        say(f"\nall tracks: {count} episodes, {count - failures} without failure ({1 - failures / count:.1%})")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2), encoding="utf-8")
    return results


def export_driver(args: Args) -> Path:
    """`--export`: the driver of a checkpoint as the browser game loads it, model.onnx and vecnorm_stats.json."""
    try:
        import onnx
    except ImportError as error:
        raise ValueError("--export needs a package that is not installed: pip install onnx onnxruntime") from error
    agent = restore_agent(load_checkpoint(args.checkpoint, prefer="best.pt"), args.checkpoint)
    model, stats = agent.to_onnx(onnx), agent.observation_stats()
    args.export.mkdir(parents=True, exist_ok=True)
    path = args.export / "model.onnx"
    onnx.save(model, str(path))
    (args.export / "vecnorm_stats.json").write_text(json.dumps(stats, indent=2) + "\n", encoding="utf-8")
    say(
        f"{path}: obs [batch, {OBS_SIZE}], normalised with vecnorm_stats.json beside it -> actions [batch, {len(ACTION_LOW)}]"
    )
    try:
        import onnxruntime
    except ImportError:
        say("not checked: for that, pip install onnxruntime")
        return path
    rng = np.random.default_rng(0)
    obs = rng.uniform(*(bound.astype(np.float32) for bound in (OBS_LOW, OBS_HIGH)), (10_000, OBS_SIZE)).astype(
        np.float32
    )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (actions,) = session.run(None, {"obs": normalize_as_the_game(obs, stats)})
    difference = float(np.abs(actions - agent.driver()(obs)).max())
    say(f"checked with onnxruntime on 10,000 observations: the actions differ by {difference:.1e} at most")
    if not difference <= 1e-5:
        raise ValueError(
            f"the exported model does not act as the checkpoint does: its actions differ by {difference:g}"
        )
    return path


def normalize_as_the_game(obs: np.ndarray, stats: dict) -> np.ndarray:
    """What the game does to observations (N, 14) before it asks the model."""
    mean, var = np.array(stats["obs_mean"], np.float32), np.array(stats["obs_var"], np.float32)
    normalized = (obs - mean) / np.sqrt(var + np.float32(stats["epsilon"]))
    return np.clip(normalized, -stats["clip_obs"], stats["clip_obs"]).astype(np.float32)


def main() -> int:
    program = Path(__file__).name
    first = os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"
    flags = [word for word in sys.argv[1:] if word.startswith("--")]
    words = {flag.split("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags}

    def complain(error, more: str = "") -> None:
        if first or not getattr(error, "shared", False):  # what all processes know, one says
            who = program if first else f"{program}, process {os.environ['RANK']}"
            warn(f"\n{who}: {error}{more}")

    try:
        args = tyro.cli(Args, description=__doc__)
        args.given = {field.name for field in dataclasses.fields(Args)} & words
        if "bridge_url" in args.given and not args.bridge_url:
            raise ValueError("--bridge-url has no URL; give one like ws://localhost:9876, or leave the flag out")
        if args.export is not None:
            export_driver(args)
            return 0
        if args.evaluate is not None:
            evaluate_checkpoint(args)
            return 0
        result = train(args)
    except BridgeError as error:
        saved = getattr(error, "saved_in", None)
        complain(error, f"\nSaved; go on with: {command()} --resume {shlex.quote(str(saved))}" if saved else "")
        return EXIT_BRIDGE
    except TeamError as error:
        folder = getattr(error, "folder", None)
        where = (
            f"; go on from the last checkpoint with: {command()} --resume {shlex.quote(str(folder))}" if folder else ""
        )
        complain(error, f". The run ends{where}")
        return EXIT_TEAM
    except FloatingPointError as error:
        folder = getattr(error, "folder", "the run folder")
        complain(error, f". Learning has blown up, and nothing of that was saved: the last checkpoint in {folder} is from before. "
                 "Start again with a smaller --learning-rate")  # fmt: skip
        return 1
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    except KeyboardInterrupt:
        warn(f"\n{program}: stopped at once; --resume goes on from the run's last checkpoint, if it has one")
        return EXIT_INTERRUPTED
    if not result["saved"]:
        again = f"{command()} --resume {shlex.quote(result['run_folder'])}"
        if first:
            warn(
                f"\n{program}: the end of this run is not on the disk; make room, and go on from the last checkpoint: {again}"
            )
        return 1
    if result["finished"] or result["signal"] is None:
        return 0
    return EXIT_TERMINATED if result["signal"] == signal.SIGTERM else EXIT_INTERRUPTED


if __name__ == "__main__":
    leave(main())
