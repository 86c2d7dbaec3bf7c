"""SAC for the top-down racer, whole in this file: the driver that needs the fewest steps, for games that are slow.

    python sac_racer.py                                              # about 65 s: laps of 6.5 s on track-01
    python sac_racer.py --num-envs 8                                 # as on a bridge: 6.6 s after 120,000 steps
    python sac_racer.py --bridge-url ws://localhost:9876             # train in the real game (its bridge has to run)
    python sac_racer.py --resume runs/NAME                           # go on, bit for bit, after any interruption
    python sac_racer.py --evaluate runs/NAME/best.pt --episodes 10   # laps and lap times of a trained driver
    python sac_racer.py --export game/driver --checkpoint runs/NAME  # for the browser game: model.onnx
    tensorboard --logdir runs

SAC (Haarnoja et al. 2018) keeps every step it has driven in a buffer and learns from all of them again and again. Two critics
learn what an action is worth (`critic_loss`): the rewards of the next ticks, and from there on what the critics themselves
expect of the driver (`soft_target`). The actor learns to choose what the critics like (`actor_loss`) while staying as random
as it can afford; `alpha` is the price of randomness, and learns too (`alpha_loss`). Taking the lower of two critics keeps the
actor from believing in their errors, and targets that follow slowly keep the critics from chasing themselves.

Read on in this order: Args, Agent, ReplayBuffer, drive_and_learn, update, checkpoint, train.
Shapes: T ticks in the buffer, N cars, B samples of a minibatch.
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
import secrets  # noqa: E402
import shlex  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402
import zipfile  # noqa: E402
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

ALGORITHM = "sac"
CHECKPOINT_FORMAT = 2
CHECKPOINT_KEYS = ("args", "agent", "optimizers", "scaler", "stats", "envs", "config", "generators", "counters", "best")
CHECKPOINT_KEYS += ("buffer",)
NOT_OVER_CARS = ("moments", "episodes", "totals")  # what in a state is of the run, and not an array over its cars
NOT_SETTINGS = (
    "resume",
    "evaluate",
    "episodes",
    "json",
    "export",
    "checkpoint",
)  # flags that say what to do, not how to train
MAY_CHANGE = (
    "total_timesteps",
    "eval_every",
    "checkpoint_every",
    "tensorboard",
    "bridge_retries",
    "save_buffer",
)  # on --resume
# Mean and deviation of observations on these tracks at a fair pace, rounded: rays, speed, yaw rate, steer, arc, centreline.
OBS_MEAN = (*[0.25] * 9, 0.6, 0.0, 0.0, 0.5, 0.2)
OBS_STD = (*[0.2] * 9, 0.25, 0.3, 0.5, 0.3, 0.15)
NORM_EPSILON = 1e-6
PUBLISHED_LAP_TICKS = {"track-01": 442, "track-03": 1069}  # flying laps of the driver the game's authors published
FEW_CARS = 16  # up to here the defaults are those for a slow game
LOG_STD_RANGE = -5.0, 1.0  # of the policy before squashing
MOST_THROTTLE = 0.9  # where --init-throttle ends, of [-1, 1]: at 1 the mean before squashing would be infinite
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
    """Train, resume or evaluate a driver with SAC."""

    # -- run
    total_timesteps: MaybeInt = None
    """environment steps of the whole run, all cars together (default 1,000,000; 120,000 with up to 16 cars)"""
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
    """cars driven at once (default 64; 8 on a bridge, where every car is a connection)"""
    action_repeat: int = 4
    """ticks a choice is kept while learning: one tick does too little to be judged (the finished driver chooses every tick)"""

    # -- algorithm
    gamma: float = 0.97
    """discount a tick: 0.97 looks about 33 ticks (0.6 s) ahead"""
    n_step: int = 5
    """choices whose rewards are measured before the critics' own expectation takes over"""
    tau: float = 0.01
    """how far the targets follow the critics with every update: small is calm, large is quick"""
    init_alpha: float = 0.01
    """price of randomness at the start, in scaled rewards"""
    autotune: bool = True
    """let alpha learn to hold the entropy at --target-entropy; otherwise it stays as it was at the start"""
    target_entropy: float = -6.0
    """entropy the policy is held to, of its three actions in [-1, 1] together; lower is calmer in the end"""
    init_std: float = 0.5
    """first standard deviation of the actions before squashing; learned from then on, for every state"""
    init_throttle: float = 1.0
    """first mean of the throttle, with the brake off: a car that presses it finds out about driving sooner"""
    hidden: MaybeInt = None
    """width of the two hidden layers of actor and critic (default 64; 96 for several tracks)"""
    norm_steps: int = 0
    """gather observation statistics for so many steps, then freeze them (default: fixed ones, which gave faster laps)"""

    # -- optimisation
    learning_rate: float = 1e-3
    """Adam's step size at the start"""
    anneal_lr: bool = True
    """let the learning rate fall to 0 over the run"""
    buffer_size: MaybeInt = None
    """choices kept to learn from; keeping only recent ones gave faster laps (default 30,000; 10,000 with few cars)"""
    learning_starts: int = 5_000
    """steps driven before learning begins, or until the buffer is full"""
    batch_size: int = 256
    """samples per optimiser step (rounded up to an equal share for every process)"""
    updates: int = 8
    """optimiser steps of the critics after every choice of all cars, made while the cars drive"""
    policy_frequency: int = 2
    """updates of the critics per update of the actor"""

    # -- logging and checkpoints
    run_dir: Path = Path("runs")
    """where run folders go"""
    run_name: MaybeStr = None
    """name of the run folder (default: algorithm, track, seed and time)"""
    eval_every: MaybeInt = None
    """steps between evaluations: an episode per track from the grid, without noise (default 100,000; 10,000 with few cars)"""
    checkpoint_every: MaybeInt = None
    """steps between checkpoints; one comes at the end, on Ctrl+C and if the bridge fails (default 100,000; 10,000 on a bridge)"""
    tensorboard: bool = True
    """write TensorBoard events (metrics.csv is always written)"""
    log_every: MaybeInt = None
    """steps between rows of metrics; stopping, saving and evaluating wait for one (default 20,000; 2,000 with few cars)"""
    save_buffer: bool = True
    """save the replay buffer beside checkpoint.pt; without it a resumed run has to fill a new one first"""

    def __post_init__(self):
        # What was given, as against left at its default: --resume and --evaluate have to know. (main looks at the command.)
        self.given = {field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default}
        if self.num_envs is None:
            cars = 8 if self.bridge_url else 64
            self.num_envs = math.ceil(cars / self.num_processes) * self.num_processes  # an equal share for each
        few_cars = self.num_envs <= FEW_CARS  # so steps are dear, or the user wants to make the most of them
        for name, many, few in (
            ("track_id", ("track-01",), ("track-01",)),
            ("total_timesteps", 1_000_000, 120_000),
            ("buffer_size", 30_000, 10_000),
            ("log_every", 20_000, 2_000),
            ("eval_every", 100_000, 10_000),
            ("checkpoint_every", 100_000, 10_000),
        ):
            if getattr(self, name) is None:
                setattr(self, name, few if few_cars else many)
        if self.hidden is None:
            self.hidden = 64 if len(self.track_id) == 1 else 96
        if self.start is None:  # the real game knows the grid only
            to_recover = len(self.track_id) > 1 and self.evaluate is None and not self.bridge_url
            self.start = "anywhere" if to_recover else "grid"
        self._check_ranges()
        self.log_every = min(self.log_every, self.eval_every, self.checkpoint_every, self.total_timesteps)
        self._check_shares()
        if self.buffer_size < self.num_envs * self.n_step:
            raise ValueError(
                f"--buffer-size is {self.buffer_size}, but {self.num_envs} cars make {self.num_envs * self.n_step} choices in "
                f"--n-step {self.n_step}: make it larger"
            )
        if self.updates % self.policy_frequency:
            raise ValueError(
                f"--updates is {self.updates}, which is no multiple of --policy-frequency {self.policy_frequency}: make it one"
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
            "action_repeat",
            "hidden",
            "n_step",
            "buffer_size",
            "batch_size",
        )
        counts += ("policy_frequency", "log_every", "eval_every", "checkpoint_every")
        for name, least, most in (
            *((name, 1, 2**53) for name in counts),
            *((name, 0, 1e9) for name in ("norm_steps", "learning_starts", "updates", "bridge_retries")),
            ("gamma", 0, 1),
            *((name, 1e-9, 1e9) for name in ("learning_rate", "init_alpha")),
            ("init_std", 0.01, 2.5),  # well inside LOG_STD_RANGE
            ("tau", 1e-9, 1),
            ("target_entropy", -1e3, 2),
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
    def steps_per_choice(self) -> int:
        return self.num_envs * self.action_repeat

    @property
    def choices_per_iteration(self) -> int:
        return max(1, round(self.log_every / self.steps_per_choice))

    @property
    def steps_per_iteration(self) -> int:
        return self.choices_per_iteration * self.steps_per_choice

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
    """Actor, critics, their targets and the normaliser of their observations: one state_dict drives.

    The policy is a Gaussian squashed by tanh: inside this class actions are in [-1, 1], and `to_inputs` stretches them to the
    game's box. Its entropy, and so the target entropy, is that of the actions in [-1, 1]. Without noise the driver gives the
    squashed mean.
    """

    def __init__(self, hidden: int = 64, init_std: float = 0.5, init_throttle: float = 1.0, init_alpha: float = 0.01):
        super().__init__()
        size = len(ACTION_LOW)
        self.actor = actor_net(hidden, size)
        throttle = math.atanh(min(max(2 * init_throttle - 1, -MOST_THROTTLE), MOST_THROTTLE))
        with torch.no_grad():
            self.actor[-1].bias.copy_(
                torch.tensor([0.0, throttle, -math.atanh(MOST_THROTTLE), *[math.log(init_std)] * size])
            )
        self.qf1, self.qf2 = (critic_net(hidden, size) for _ in range(2))
        self.log_alpha = nn.Parameter(torch.tensor(math.log(init_alpha)))
        # What actor and critics see of each other. It moves between updates, see `move_targets`.
        self.actor_target, self.qf1_target, self.qf2_target = (
            copy.deepcopy(net).requires_grad_(False) for net in (self.actor, self.qf1, self.qf2)
        )
        self.register_buffer("obs_mean", torch.tensor(OBS_MEAN))
        self.register_buffer("obs_var", torch.tensor(OBS_STD).square())
        # --norm-steps adds to these; they count as many, for the first cars all stand on the grid
        self.register_buffer("obs_count", torch.tensor(1000.0, dtype=torch.float64))

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

    def sample(self, actor, obs, noise):
        """Actions (B, 3) in [-1, 1] for normalised observations, and their log-probabilities (B,)."""
        mean, log_std = actor(obs).chunk(2, dim=-1)
        return squashed_sample(mean, log_std.clamp(*LOG_STD_RANGE), noise)

    @torch.no_grad()
    def act(self, obs, noise):
        """What drives while learning: actions (N, 3) in [-1, 1] for raw observations."""
        return self.sample(self.actor, self.normalize(obs), noise)[0]

    @torch.no_grad()
    def move_targets(self, share: float) -> None:
        """The critics' targets move a share of the way to the critics, the actor's all the way to the actor."""
        for target, net in ((self.qf1_target, self.qf1), (self.qf2_target, self.qf2)):
            for old, new in zip(target.parameters(), net.parameters(), strict=True):
                old.lerp_(new, share)
        self.actor_target.load_state_dict(self.actor.state_dict())

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
                x = x @ weight + bias
                x = x / (1 + np.exp(np.minimum(-x, 80)))  # SiLU; beyond that exp would overflow
            x = x @ layers[-1][0] + layers[-1][1]
            return to_inputs(np.tanh(x[:, : len(ACTION_LOW)]))

        return drive

    def to_onnx(self, onnx):
        """The driver as a model of ONNX: normalised observations (batch, 14) -> inputs in the box (batch, 3)."""
        net, count = OnnxNet(onnx), len(ACTION_LOW)
        x = "obs"
        for layer in self.actor[::2]:
            weight, bias = layer.weight, layer.bias
            if layer is self.actor[-1]:  # the means only
                weight, bias = weight[:count], bias[:count]
            x = net.add("Gemm", x, net.number(weight), net.number(bias), transB=1)
            if layer is not self.actor[-1]:
                x = net.add("Mul", x, net.add("Sigmoid", x))
        x = net.add("Add", net.add("Tanh", x), net.number(np.ones(count)))
        x = net.add("Mul", x, net.number((ACTION_HIGH - ACTION_LOW) / 2))
        return net.model(net.add("Add", x, net.number(ACTION_LOW)))

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


def to_inputs(actions: np.ndarray) -> np.ndarray:
    """Actions in [-1, 1] (N, 3) as the game's inputs, in its box."""
    return np.clip(ACTION_LOW + (actions + 1) * ((ACTION_HIGH - ACTION_LOW) / 2), ACTION_LOW, ACTION_HIGH)


def actor_net(hidden: int, actions: int) -> nn.Sequential:
    """Observation -> means and log deviations of the actions before squashing."""
    net = nn.Sequential(
        nn.Linear(OBS_SIZE, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 2 * actions)
    )
    with torch.no_grad():
        net[-1].weight.mul_(0.01)  # so that the first policy does the same everywhere
    return net


def critic_net(hidden: int, actions: int) -> nn.Sequential:
    """Observation and action -> what it is worth. The normalised layers keep values of unseen actions within bounds."""
    return nn.Sequential(
        nn.Linear(OBS_SIZE + actions, hidden), nn.LayerNorm(hidden), nn.SiLU(),
        nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.SiLU(),
        nn.Linear(hidden, 1),
    )  # fmt: skip


def squashed_sample(mean, log_std, noise):
    """tanh(mean + std * noise), and its log-density summed over the action.

    The density of a squashed variable is divided by the slope of the squashing, 1 - tanh(u)^2, written so that it holds
    where tanh(u) rounds to 1. By hand: torch.distributions takes several times as long.
    """
    u = mean + log_std.exp() * noise
    log_slope = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))
    logprobs = -0.5 * noise * noise - log_std - 0.5 * math.log(2 * math.pi) - log_slope
    return torch.tanh(u), logprobs.sum(-1)


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
# Replay buffer and driving
# ======================================================================================================================


@dataclasses.dataclass
class Answer:
    """What came of one choice of all cars."""

    obs: np.ndarray  # (N, 14) where the cars are now
    next_obs: np.ndarray  # (N, 14) where the choice led: the same, or the last of an episode that ended
    rewards: np.ndarray  # (N,) discounted sum over the ticks
    discounts: (
        np.ndarray
    )  # (N,) gamma^ticks, the weight of what comes after; 0 after a termination, which has no future
    terminated: np.ndarray  # (N,)
    truncated: np.ndarray  # (N,)

    @property
    def ended(self) -> np.ndarray:
        return self.terminated | self.truncated


class ReplayBuffer:
    """The last choices of all cars, a ring (T, N), as the environment answered them: raw observations, raw rewards.

    `next_obs` is what truly followed; where an episode ended, its last observation and not the first of the next one.
    Normalising and scaling wait until a choice is learned from, so that old ones have no old statistics.
    """

    ARRAYS = ("obs", "next_obs", "actions", "rewards", "discounts", "ended")

    def __init__(self, size: int, num_envs: int):
        self.rows, self.num_envs = size // num_envs, num_envs
        try:
            self.obs = torch.zeros(self.rows, num_envs, OBS_SIZE)  # (T, N, 14)
            self.next_obs = torch.zeros(self.rows, num_envs, OBS_SIZE)  # (T, N, 14)
            self.actions = torch.zeros(self.rows, num_envs, len(ACTION_LOW))  # (T, N, 3)
            self.rewards = torch.zeros(self.rows, num_envs)  # (T, N), and so are the others
            self.discounts = torch.zeros(self.rows, num_envs)
            self.ended = torch.zeros(self.rows, num_envs, dtype=torch.bool)  # terminated or truncated
        except RuntimeError as error:
            raise ValueError(
                f"--buffer-size is {size}, for which there is not enough memory; make it smaller"
            ) from error
        self.filled = self.head = 0  # rows there are, and where the next one goes

    def __len__(self) -> int:
        """Choices there are."""
        return self.filled * self.num_envs

    def add(self, obs, actions, answer: Answer) -> None:
        """One choice of all cars, and what came of it."""
        t = self.head
        self.obs[t], self.actions[t] = obs, actions
        self.next_obs[t], self.rewards[t] = torch.from_numpy(answer.next_obs), torch.from_numpy(answer.rewards)
        self.discounts[t] = torch.from_numpy(answer.discounts)
        self.ended[t] = torch.from_numpy(answer.ended)
        self.head = (t + 1) % self.rows
        self.filled = min(self.filled + 1, self.rows)

    def cut(self) -> None:
        """What comes next does not follow from what there is: the cars begin anew."""
        if self.filled:
            self.ended[self.head - 1] = True

    def sample(self, count: int, n_step: int, scale, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """`count` choices, each as likely, with the rewards of n from there on, or fewer where the episode ends.

        -> obs, actions, rewards: their discounted sum, next_obs: what followed the last of them, and discounts: how much the
        value of that counts. `scale` (N,) multiplies the rewards.
        """
        oldest = self.head - self.filled
        row = oldest + torch.randint(max(self.filled - n_step + 1, 1), (count,), generator=generator)
        car = torch.randint(self.num_envs, (count,), generator=generator)
        rewards, discounts, going_on = torch.zeros(count), torch.ones(count), torch.ones(count, dtype=torch.bool)
        first = last = row % self.rows * self.num_envs + car
        for k in range(min(n_step, self.filled)):
            here = (row + k) % self.rows * self.num_envs + car
            last = torch.where(going_on, here, last)
            rewards += going_on * discounts * self.rewards.view(-1)[here]
            discounts = torch.where(going_on, discounts * self.discounts.view(-1)[here], discounts)
            going_on = going_on & ~self.ended.view(-1)[here]
        return {
            "obs": self.obs.view(-1, OBS_SIZE)[first],
            "actions": self.actions.view(-1, len(ACTION_LOW))[first],
            "rewards": rewards * scale[car],
            "discounts": discounts,
            "next_obs": self.next_obs.view(-1, OBS_SIZE)[last],
        }

    def save(self, path: Path, team: Team) -> bool:
        """The choices of all processes in one file; of one process, without a second copy in memory. -> whether it worked"""
        arrays = {name: getattr(self, name)[: self.filled].numpy() for name in self.ARRAYS}
        if team.size > 1:
            everyones = {name: team.collect(array) for name, array in arrays.items()}
            if not team.first:
                return True
            arrays = {name: np.concatenate(parts, axis=1) for name, parts in everyones.items()}

        def write(file) -> None:  # as np.savez does, which before NumPy 2.3 makes a noise when the disk is full
            with zipfile.ZipFile(file, "w") as whole:
                for name, array in {"head": np.array(self.head), **arrays}.items():
                    with whole.open(f"{name}.npy", "w", force_zip64=True) as part:
                        np.lib.format.write_array(part, array, allow_pickle=False)

        return write_whole(path, write)

    def load(self, path: Path, team: Team) -> None:
        """This process's share of a file. ValueError if it is none of these, damaged, or of other sizes; no code in it is run."""
        lengths = set()
        for name in self.ARRAYS:
            found = team.share(self._read, path, name, team.size)
            getattr(self, name)[: len(found)] = torch.from_numpy(np.split(found, team.size, axis=1)[team.rank])
            lengths.add(len(found))
        self.filled, self.head = len(found), int(team.share(self._read, path, "head"))
        if len(lengths) > 1 or not 0 <= self.head < self.rows:
            raise self._refusal(path, f"its parts do not fit together: lengths {lengths}, head {self.head}")

    def _read(self, path: Path, name: str, shares: int = 1) -> np.ndarray:
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                found = file[name]
            if name in self.ARRAYS:
                own = getattr(self, name).numpy()
                fitting = (self.num_envs * shares, *own.shape[2:])
                if found.shape[1:] != fitting or found.dtype != own.dtype or len(found) > self.rows:
                    raise ValueError(f"{name} has shape {found.shape}, which does not fit {(self.rows, *fitting)}")
            return found
        except (OSError, KeyError, EOFError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise self._refusal(path, error) from error

    @staticmethod
    def _refusal(path: Path, reason) -> ValueError:
        return ValueError(
            f"the replay buffer {path} is missing, damaged or of another run ({reason}). To go on with an empty one, "
            "remove it and give --no-save-buffer"
        )


def drive(envs, inputs: np.ndarray, ticks: int, gamma: float, stats: RaceStats) -> Answer:
    """Give all cars these inputs for some ticks. What comes after the end of an episode belongs to the next, and to no answer.

    A truncated episode would have gone on, so what follows its last observation counts; a terminated one has no future.
    """
    count = envs.num_envs
    rewards, discounts, final_obs = np.zeros(count), np.ones(count), {}
    terminated, truncated, going_on = np.zeros(count, bool), np.zeros(count, bool), np.ones(count, bool)
    for _ in range(ticks):
        obs, reward, term, trunc, infos = envs.step(inputs)
        stats.step(infos)
        rewards += going_on * discounts * reward
        discounts[going_on] *= gamma
        terminated |= going_on & term
        truncated |= going_on & trunc
        for i in np.flatnonzero(going_on & (term | trunc)):
            final_obs[i] = infos["final_obs"][i]
        going_on &= ~(term | trunc)
    next_obs = obs.copy()
    for i, last in final_obs.items():
        next_obs[i] = last
    return Answer(obs, next_obs, rewards, discounts * ~terminated, terminated, truncated)


# ======================================================================================================================
# Learning
# ======================================================================================================================


def soft_target(rewards, discounts, next_q1, next_q2, next_logprobs, alpha):
    """What the critics should have said (B,): the measured rewards, then the lower of two opinions on what follows, which is
    worth more the less predictable the driver stays."""
    return rewards + discounts * (torch.minimum(next_q1, next_q2) - alpha * next_logprobs)


def critic_loss(q1, q2, targets):
    return 0.5 * ((q1 - targets).square().mean() + (q2 - targets).square().mean())


def actor_loss(q1, q2, logprobs, alpha):
    """Choose what the critics value, and stay random where that costs little."""
    return (alpha * logprobs - torch.minimum(q1, q2)).mean()


def alpha_loss(log_alpha, logprobs, target_entropy: float):
    """The price of randomness rises while the entropy (-logprobs) is below its target, and falls while it is above."""
    return -(log_alpha.exp() * (logprobs.mean() + target_entropy))


def make_optimizers(agent: Agent, learning_rate: float) -> dict[str, torch.optim.Adam]:
    """An Adam for the actor and alpha, and one for the critics; fused where this torch can do that on this device."""

    def adam(*parameters):
        vector = as_one_vector(list(parameters))
        with contextlib.suppress(RuntimeError):
            return torch.optim.Adam([vector], lr=learning_rate, fused=True)
        return torch.optim.Adam([vector], lr=learning_rate)

    actor, critics = agent.actor.parameters(), [*agent.qf1.parameters(), *agent.qf2.parameters()]
    return {"actor": adam(agent.log_alpha, *actor), "critic": adam(*critics)}


def as_one_vector(parameters: list[nn.Parameter]) -> nn.Parameter:
    """A vector of which the parameters, and their gradients, become parts: what is done to it is done to all, in one go."""
    vector = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    vector.grad = torch.zeros_like(vector)
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, value, grad in zip(parameters, vector.data.split(sizes), vector.grad.split(sizes), strict=True):
        parameter.data, parameter.grad = value.view_as(parameter), grad.view_as(parameter)
    return vector


def update(
    agent: Agent, optimizers, batches: dict[str, tuple], args: Args, generator: torch.Generator, other_core, team: Team
) -> dict:
    """As many updates as there are batches: tuples of tensors (B, ...), with observations normalised. -> mean losses

    In a process alone critics and actor learn at the same time, on a core each. Neither looks at what the other is changing:
    the critics ask the actor's target what it would do next, the actor asks the critics' targets what that is worth, and the
    targets move when both are done. So the numbers do not depend on who is faster, and updating one never reaches the
    other's weights. Of several processes each has one core, and all gradients are averaged over the processes.
    """
    count, size = len(batches["obs"]), (len(batches["obs"][0]), len(ACTION_LOW))
    noise = torch.randn(2, count, *size, generator=generator)
    critics = update_critics(agent, optimizers["critic"], batches, noise[0], agent.log_alpha.exp().item())
    actor = update_actor(agent, optimizers["actor"], batches["obs"], noise[1], args)
    if team.size == 1:
        on_other_core = other_core.submit(learn_to_the_end, critics)
        losses = learn_to_the_end(actor) | on_other_core.result()
    else:
        losses = learn_in_step(team, actor, critics)
    agent.move_targets(1 - (1 - args.tau) ** count)
    return losses


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


def update_critics(agent: Agent, optimizer, batches: dict[str, tuple], noise, alpha: float):
    """The critics' share of an update, as a learner."""
    losses = []
    names = ("obs", "actions", "rewards", "discounts", "next_obs")
    for mb_noise, *minibatch in zip(noise, *(batches[name] for name in names), strict=True):
        mb_obs, mb_actions, mb_rewards, mb_discounts, mb_next_obs = minibatch
        with torch.no_grad():
            next_actions, next_logprobs = agent.sample(agent.actor_target, mb_next_obs, mb_noise)
            next_q1, next_q2 = opinions(agent.qf1_target, agent.qf2_target, mb_next_obs, next_actions)
            targets = soft_target(mb_rewards, mb_discounts, next_q1, next_q2, next_logprobs, alpha)
        loss = critic_loss(*opinions(agent.qf1, agent.qf2, mb_obs, mb_actions), targets)
        yield from learn(optimizer, loss)
        losses.append(loss.detach())
    return {"train/critic_loss": torch.stack(losses).mean().item()}


def update_actor(agent: Agent, optimizer, batches_obs: tuple, noise, args: Args):
    """The actor's share of an update, and alpha's, as a learner: every policy_frequency-th batch."""
    losses = []
    every = slice(None, None, args.policy_frequency)
    for mb_obs, mb_noise in zip(batches_obs[every], noise[every], strict=True):
        alpha = agent.log_alpha.exp().detach()
        actions, logprobs = agent.sample(agent.actor, mb_obs, mb_noise)
        loss = actor_loss(*opinions(agent.qf1_target, agent.qf2_target, mb_obs, actions), logprobs, alpha)
        price = alpha_loss(agent.log_alpha, logprobs.detach(), args.target_entropy)
        yield from learn(optimizer, loss + price if args.autotune else loss)  # they have no weights in common
        losses.append(torch.stack([loss.detach(), price.detach(), alpha, -logprobs.detach().mean()]))
    names = ("train/actor_loss", "train/ent_coef_loss", "train/ent_coef", "train/entropy")
    return dict(zip(names, torch.stack(losses).mean(0).tolist(), strict=True))


def opinions(qf1, qf2, obs, actions):
    """Both opinions on actions (B, 3) in [-1, 1] -> (B,), (B,)"""
    x = torch.cat([obs, actions], dim=-1)
    return qf1(x).squeeze(-1), qf2(x).squeeze(-1)


def learn(optimizer, loss):
    """One step down the gradient, which is yielded beforehand."""
    (parameters,) = optimizer.param_groups[0]["params"]
    parameters.grad.zero_()
    loss.backward()
    yield parameters.grad
    optimizer.step()


def check_finite(agent: Agent, metrics: dict, update: int) -> None:
    """Learning that has blown up must not go on, nor reach a checkpoint."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise FloatingPointError(f"{name} has become {value} in update {update}")
    for name, value in agent.state_dict().items():
        if not torch.isfinite(value).all():
            raise FloatingPointError(f"the weights {name} are no finite numbers after update {update}")


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
        # What may be refused first, before anything else is made: the memory for the buffer, then the bridge.
        self.buffer = ReplayBuffer(args.buffer_size // team.size, cars)
        with team.together():
            self.envs = RacerVectorEnv(cars, **env, start=args.start, stagger=True, first_car=first_car)
            try:
                self.envs.check()
                self.eval_envs = RacerVectorEnv(len(args.track_id), **env) if team.first else None
            except BaseException:
                self.envs.close()
                raise
        self.agent = Agent(args.hidden, args.init_std, args.init_throttle, args.init_alpha)
        self.agent.load_state_dict(team.share(self.agent.state_dict))  # other machines may round otherwise
        self.optimizers = make_optimizers(self.agent, args.learning_rate)
        self.scaler = RewardScaler(cars, args.gamma**args.action_repeat, len(args.track_id), first_car)
        self.other_cores = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=[args.threads])
        self.stats = RaceStats(cars, self.envs.config["episode"]["maxSteps"], args.start == "grid")
        self.steps = 0
        self.bridge_faults = self.faults_in_a_row = 0
        self.seconds_before = 0.0  # in sessions before this one
        self.best = {"score": -math.inf, "step": 0, "episodes": []}
        self.best_laps: tuple[list[Episode], np.ndarray] | None = None  # of this session, for pictures
        self.published_beaten: dict | None = None

    def begin(self) -> None:
        obs, infos = self.envs.reset(seed=self.args.seed)
        self.obs = torch.from_numpy(obs)  # (N, 14) where the cars are
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
        """checkpoint.pt and its replay buffer as a pair: the buffer first, under a new name, then the checkpoint that names it,
        and only then the old buffer goes. Wherever this ends, there is a checkpoint and the buffer it names."""
        with self.clock("checkpoints"):
            with_buffer = self.args.save_buffer and name == "checkpoint.pt"
            buffer = f"buffer-{self.steps}-{secrets.token_hex(4)}.npz" if with_buffer else None
            saved = buffer is None or self.buffer.save(self.folder / buffer, self.team)
            state = self.get_state(buffer)
            saved = self.team.share(lambda: saved and save_checkpoint(self.folder / name, state))
            if name == "checkpoint.pt" and self.team.first:
                for file in self.folder.glob("buffer-*.npz"):
                    if file.name != buffer if saved else file.name == buffer:
                        with contextlib.suppress(OSError):
                            file.unlink()
            return saved

    def get_state(self, buffer_file: str | None = None) -> dict:
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
            "buffer": buffer_file,
        }

    def set_state(self, checkpoint: dict, folder: Path) -> None:
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
            file = None if checkpoint["buffer"] is None else folder / Path(checkpoint["buffer"]).name
            if file is not None and (team.share(file.exists) or self.args.save_buffer):
                self.buffer.load(file, team)
            elif team.first:
                say("no replay buffer was saved with this checkpoint: the driver fills a new one with "
                    f"{self.args.learning_starts:,} steps first, and ends elsewhere than an unbroken run")  # fmt: skip
            if checkpoint["envs"] is None:  # the real game begins new episodes
                self.stats.forget_episodes()
                self.scaler.returns[:] = 0
                self.begin()
                self.buffer.cut()
            else:
                self.obs = torch.from_numpy(self.envs.set_state(share_of(unpack(checkpoint["envs"]), team)))
        except BridgeError:
            raise
        except (KeyError, RuntimeError, TypeError) as error:
            raise ValueError(f"this checkpoint does not fit this program or its settings: {error!r}") from error

    def close(self) -> None:
        self.other_cores.shutdown()
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
    """Some choices of all cars, and what is learned meanwhile. -> metrics"""
    args = run.args
    rate = args.learning_rate * (1 - run.iteration / args.num_iterations if args.anneal_lr else 1)
    for optimizer in run.optimizers.values():
        optimizer.param_groups[0]["lr"] = rate
    losses = [drive_and_learn(run) for _ in range(args.choices_per_iteration)]
    losses = [loss for loss in losses if loss]
    metrics = {name: float(np.mean([loss[name] for loss in losses])) for name in (losses[0] if losses else ())}
    metrics["train/learning_rate"] = rate
    return metrics


def drive_and_learn(run: Run) -> dict[str, float]:
    """All cars do what the actor chooses, for action_repeat ticks; while they drive, actor and critics learn from what is in
    the buffer already. The slower of the two is waited for: no step is driven twice, none is learned from before its time.
    """
    args, agent, buffer, clock, team = run.args, run.agent, run.buffer, run.clock, run.team
    actions, driving = begin_to_drive(run)
    losses = {}
    choices = len(buffer) * team.size  # of all processes
    ready = choices * args.action_repeat >= args.learning_starts or buffer.filled == buffer.rows
    if args.updates and ready and buffer.filled >= args.n_step:
        with clock("learning"):
            batches = sample_batches(agent, buffer, run.scaler, args, run.generator, team)
            losses = update(agent, run.optimizers, batches, args, run.generator, run.other_cores, team)
            check_finite(agent, losses, run.iteration + 1)
    answer = None
    with clock("environment"), team.together():
        while answer is None:
            try:
                answer = driving.result()
            except BridgeError as error:  # so this choice has no answer: none is made up, another one is made
                run.obs = torch.from_numpy(run.recover(error))
                buffer.cut()
                run.scaler.returns[:] = 0
                actions, driving = begin_to_drive(run)
    buffer.add(run.obs, actions, answer)
    run.scaler.update(answer.rewards[None], answer.ended[None], team.gather)
    if run.steps < args.norm_steps:
        agent.update_normalizer(run.obs, team.gather)
    run.obs = torch.from_numpy(answer.obs)
    run.steps += args.steps_per_choice
    return losses


def begin_to_drive(run: Run):
    """A choice for all cars, which another core begins to drive. -> the choice, and the promise of its answer"""
    with run.clock("policy"):
        actions = run.agent.act(run.obs, torch.randn(len(run.obs), len(ACTION_LOW), generator=run.generator))
        inputs = to_inputs(actions.numpy())
    args = run.args
    return actions, run.other_cores.submit(drive, run.envs, inputs, args.action_repeat, args.gamma, run.stats)


def sample_batches(agent: Agent, buffer, scaler: RewardScaler, args: Args, generator, team: Team) -> dict[str, tuple]:
    """What the next updates learn from, drawn at once: name -> as many tensors (B, ...) as there are updates.

    Of a batch every process draws its share, from what its own cars did.
    """
    size = math.ceil(args.batch_size / team.size)
    scale = torch.from_numpy((1 / scaler.deviation).astype(np.float32))
    samples = buffer.sample(args.updates * size, args.n_step, scale, generator)
    for name in ("obs", "next_obs"):
        samples[name] = agent.normalize(samples[name])
    return {name: values.split(size) for name, values in samples.items()}


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
