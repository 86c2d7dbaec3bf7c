"""SAC for the top-down racer in one file. It needs few steps, which matters where the game is slow.

    python sac_racer.py                                              # a minute or two: laps of 6.5 s on track-01
    python sac_racer.py --slow-game                                  # as on a bridge: laps of 6.6 s after 60,000 steps
    python sac_racer.py --game ../top-down-racer-02                  # train in the real game in this folder
    python sac_racer.py --resume runs/NAME                           # continue after an interruption, bit-exact
    python -m racer.evaluate runs/NAME                               # laps and lap times of a trained driver

SAC (Haarnoja et al. 2018) keeps recent experience in a replay buffer and learns from it many times. Two critics learn the value
of an action (`critic_loss`): the rewards of the next n actions, and then what their slowly following targets expect of the
policy (`soft_target`). The actor learns actions that the critics value (`actor_loss`), with an entropy bonus whose weight
`alpha` is learned too (`alpha_loss`). The lower of the two critics counts, against overestimation. The policy drives from the
first step: there is no phase of random actions. `train` is the loop around them: start reading there.

While learning, an action is held for `action_repeat` ticks, and progress is rewarded along the shortest line of the track.
An action lies in [-1, 1]; `to_box` stretches it to the game's box.
Shapes: T rows in the buffer, N cars of this process, B samples of a minibatch. `obs` is raw, `normalized_obs` is normalised.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from torch import nn

from racer.training.run import Run, all_gather, average_over_processes
from racer.training.settings import (
    Count, Fraction, NonNegative, Positive, Preset, Range, Settings, Whole, as_command, parse_args, run_as_script,
)  # fmt: skip
from racer_env import ACTION_HIGH, ACTION_LOW, OBS_SIZE, RacerVectorEnv, obs_moments

# == Args ==============================================================================================================


@dataclasses.dataclass
class Args(Settings):
    # -- run
    total_timesteps: Count = 1_000_000
    """total environment steps, all cars together"""
    seed: Whole = 1
    """random seed: the same seed and command give the same numbers"""
    start_from: Path | None = None
    """start a new run with the networks of this checkpoint or run folder"""
    resume: Path | None = None
    """continue this run folder or checkpoint with its settings; --total-timesteps may extend it"""

    # -- env
    track_id: tuple[str, ...] = ("track-01",)
    """track, or several to train one driver for all: names or .json files"""
    config_path: Path | None = None
    """JSON file with reward weights and episode limits; default: ai-config.json"""
    start: Literal["grid", "anywhere"] = "grid"
    """where episodes start: on the grid, or anywhere on the track, which teaches recovery"""
    bridge_url: tuple[str, ...] = ()
    """train in the real game behind these URLs; with --resume, none continues on the embedded engine"""
    game: Path | None = None
    """train in the real game in this folder; its bridges are started and stopped automatically"""
    bridges: Annotated[Count, Range(1, 256)] = 1
    """with --game: number of bridges to start, each on a core of its own"""
    bridge_retries: Whole = 0
    """maximum consecutive reconnect attempts when the bridge fails; 0: save a checkpoint and stop"""
    progress: Literal["line", "centreline"] = "line"
    """what progress is rewarded along while training: the shortest line, or the centreline as in evaluations"""
    off_road_penalty_scale: NonNegative = 1.0
    """multiply the config's offTrackPenalty by this during training; values above 1 make drivers more cautious"""
    stuck_ticks: Whole = 0
    """truncate an episode after this many ticks without progress; 0: never"""
    num_envs: Annotated[Count, Range(1, 65_536)] = 64
    """cars driven in parallel, all processes together; on a bridge every car is a connection"""

    # -- algorithm
    action_repeat: Annotated[Count, Range(1, 100)] = 3
    """ticks for which an action is held while learning; the finished driver acts every tick"""
    gamma: Fraction = 0.95
    """discount factor per tick: 0.95 looks about 20 ticks (0.3 s) ahead; 0.97 is better with --progress centreline"""
    n_step: Annotated[Count, Range(1, 1000)] = 5
    """actions whose rewards are measured before the critics' own estimate takes over"""
    tau: Fraction = 0.05
    """Polyak coefficient of the target networks per critic update: small is stable, large is fast"""
    init_alpha: Positive = 0.01
    """initial entropy coefficient (alpha)"""
    autotune: bool = True
    """learn alpha so that the entropy stays at --target-entropy; otherwise alpha is constant"""
    target_entropy: Annotated[float, Range(-math.inf)] = -6.0
    """target entropy of the three actions in [-1, 1]; lower gives a less random policy in the end"""
    noise_memory: Annotated[float, Range(0, 0.999)] = 0.5
    """correlation of an action's noise with that of the last action; more explores for longer"""
    init_std: Annotated[float, Range(math.exp(-5), math.e)] = 0.5
    """initial standard deviation of the actions before squashing, which is then learned for every state"""
    init_throttle: Fraction = 1.0
    """initial mean of the throttle, with the brake off; driving from the start speeds up early learning"""
    hide_arc: bool = False
    """hide the arc position from the networks, so that they cannot memorise a track"""
    hidden: Annotated[Count, Range(1, 4096)] = 64
    """width of the two hidden layers of actor and critics"""

    # -- optimisation
    learning_rate: NonNegative = 1e-3
    """Adam's initial learning rate, for critics and alpha"""
    actor_learning_rate: NonNegative = 3e-4
    """Adam's initial learning rate for the actor; a slow actor gives the critics time to follow"""
    anneal_lr: bool = True
    """anneal the learning rates linearly to 0"""
    buffer_size: Annotated[Count, Range(1, 10_000_000)] = 30_000
    """actions kept in the replay buffer, all processes together; keeping only recent ones gave faster laps"""
    learning_starts: Whole = 5_000
    """steps before learning starts, or fewer if the buffer is full"""
    batch_size: Annotated[Count, Range(1, 1_000_000)] = 160
    """samples per optimiser step, all processes together"""
    updates: Annotated[Whole, Range(0, 10_000)] = 6
    """optimiser steps of the critics per action of all cars, made while the cars drive"""
    policy_frequency: Count = 2
    """critic updates per actor update"""

    # -- logging and checkpoints
    run_dir: Path = Path("runs")
    """parent folder of run folders"""
    run_name: str = ""
    """name of the run folder; if empty: algorithm, track, seed and time"""
    eval_every: Count = 100_000
    """steps between evaluations: a deterministic episode per track from the grid"""
    checkpoint_every: Count = 100_000
    """steps between checkpoints; also saved at the end, on Ctrl+C and if the bridge fails"""
    log_every: Count = 20_000
    """steps between rows of metrics; also the granularity of evaluations, checkpoints and stopping"""
    save_buffer: bool = True
    """save the replay buffer in checkpoints; a run resumed without it has to fill a new one first"""
    tensorboard: bool = True
    """write TensorBoard events (metrics.csv is always written)"""
    pictures: bool = True
    """draw the race (race.html), racing lines and a replay"""
    wandb: str = ""
    """also log to this project of Weights & Biases (pip install wandb)"""

    def __post_init__(self):
        super().__post_init__()
        found = f"--buffer-size is {self.buffer_size}, less than {self.num_envs} cars times --n-step {self.n_step}"
        self.require(self.buffer_size >= self.num_envs * self.n_step, found)

    @property
    def steps_per_update(self) -> int:
        """Of one action of all cars."""
        return self.num_envs * self.action_repeat

    def actions_per_iteration(self, steps: int) -> int:
        """After so many steps of a run: until the next row of metrics, or the end."""
        every = min(self.log_every, self.eval_every, self.checkpoint_every, self.total_timesteps - steps)
        return max(1, round(every / self.steps_per_update))


PRESETS = (  # defaults that these flags change; later presets take precedence
    Preset("--track-id A B ...", lambda given: len(given.track_id or ()) > 1, {"start": "anywhere", "hidden": 96}),
    Preset("--start-from", lambda given: given.start_from, {
        "total_timesteps": 300_000, "start": "anywhere", "learning_rate": 3e-4, "actor_learning_rate": 3e-4,
    }),
    Preset("--game, --bridge-url, --slow-game", lambda given: given.game or given.bridge_url or given.slow_game, {  # a short run
        "total_timesteps": 60_000, "start": "grid", "num_envs": 8, "stuck_ticks": 90, "action_repeat": 4, "buffer_size": 10_000,
        "learning_starts": 3_500, "actor_learning_rate": 8e-5, "anneal_lr": False, "tau": 0.1, "init_alpha": 0.001,
        "noise_memory": 0.8, "batch_size": 256, "updates": 16, "log_every": 2_000, "eval_every": 10_000, "checkpoint_every": 10_000,
    }),
    Preset("--game", lambda given: given.game, {"bridge_retries": 10, "bridges": min(max(1, (os.cpu_count() or 1) - 1), 256)}),
)  # fmt: skip
LOG_STD_RANGE = -5.0, 1.0  # of the policy before squashing
MOST_THROTTLE = 0.99  # --init-throttle is clamped to this in [-1, 1]: atanh(1) is infinite

# == Agent =============================================================================================================


class Agent(nn.Module):
    """Actor, critics and their targets.

    The policy is a Gaussian squashed by tanh. Its entropy, and so the target entropy, is that of the actions in [-1, 1]. The
    deterministic driver gives the squashed mean.
    """

    NORM_EPSILON, NORM_CLIP = 1e-6, 4.0

    def __init__(self, hidden: int = 64, init_std=0.5, init_throttle=1.0, init_alpha=0.01, hide_arc: bool = False):
        super().__init__()
        # Observations are normalised with fixed means and variances, which are saved and exported with the weights.
        for name, values in zip(("obs_mean", "obs_var"), obs_moments(hide_arc), strict=True):
            self.register_buffer(name, torch.from_numpy(values))
        size = len(ACTION_LOW)
        self.actor = nn.Sequential(
            nn.Linear(OBS_SIZE, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 2 * size)
        )
        throttle = math.atanh(min(max(2 * init_throttle - 1, -MOST_THROTTLE), MOST_THROTTLE))
        with torch.no_grad():
            self.actor[-1].weight.mul_(0.01)  # so that the initial policy is the same everywhere
            first = [0.0, throttle, -math.atanh(MOST_THROTTLE), *[math.log(init_std)] * size]
            self.actor[-1].bias.copy_(torch.tensor(first))
        # Observation and action -> its value, by two critics. LayerNorm keeps the values of unseen actions bounded.
        self.critics = nn.Sequential(
            TwinLinear(OBS_SIZE + size, hidden), nn.LayerNorm(hidden, elementwise_affine=False), nn.SiLU(),
            TwinLinear(hidden, hidden), nn.LayerNorm(hidden, elementwise_affine=False), nn.SiLU(),
            TwinLinear(hidden, 1),
        )  # fmt: skip
        self.critic_targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(init_alpha)))

    def normalize(self, obs):
        scaled = (obs - self.obs_mean) * torch.rsqrt(self.obs_var + self.NORM_EPSILON)
        return scaled.clamp(-self.NORM_CLIP, self.NORM_CLIP)

    def policy(self, normalized_obs):
        """The Gaussian before squashing: its mean and its log standard deviation, (B, 3) each."""
        mean, log_std = self.actor(normalized_obs).chunk(2, dim=-1)
        return mean, log_std.clamp(*LOG_STD_RANGE)

    def sample(self, normalized_obs, noise):
        """Actions (B, 3) in [-1, 1] from standard normal noise (B, 3), and their log-probabilities (B,)."""
        return squashed_sample(*self.policy(normalized_obs), noise)

    @staticmethod
    def values(critics, normalized_obs, actions):
        """The values by both critics: (2, B)"""
        return critics(torch.cat([normalized_obs, actions], dim=-1).expand(2, -1, -1)).squeeze(-1)

    def forward(self, normalized_obs):
        """The deterministic driver, (N, 14) -> actions within the game's box (N, 3). This is what is exported."""
        return to_box(torch.tanh(self.policy(normalized_obs)[0]))

    @torch.inference_mode()
    def drive(self, obs: np.ndarray) -> np.ndarray:
        """Raw observations (N, 14) -> deterministic actions (N, 3)."""
        return self(self.normalize(torch.from_numpy(obs))).numpy()


class TwinLinear(nn.Module):
    """The same layer of two networks that share no weights: (2, B, inputs) -> (2, B, outputs)"""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        twins = [nn.Linear(inputs, outputs) for _ in range(2)]
        self.weight = nn.Parameter(torch.stack([layer.weight.detach().T for layer in twins]))
        self.bias = nn.Parameter(torch.stack([layer.bias.detach()[None] for layer in twins]))

    def forward(self, x):
        return torch.baddbmm(self.bias, x, self.weight)


def to_box(actions: torch.Tensor) -> torch.Tensor:
    """Actions in [-1, 1] (N, 3) -> actions in the game's box."""
    low, high = torch.tensor(ACTION_LOW), torch.tensor(ACTION_HIGH)
    return (low + (actions + 1) * ((high - low) / 2)).clamp(low, high)


def squashed_sample(mean, log_std, noise):
    """tanh(mean + std * noise), and its log-density summed over the action.

    The density is divided by the slope of tanh, 1 - tanh(u)^2, in a form that is exact where tanh(u) rounds to 1.
    """
    u = mean + log_std.exp() * noise
    log_slope = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))
    logprobs = -0.5 * noise * noise - log_std - 0.5 * math.log(2 * math.pi) - log_slope
    return torch.tanh(u), logprobs.sum(-1)


# == Reward scale, exploration noise and the replay buffer =============================================================


class RewardScaler:
    """Scales rewards so that a unit of progress pays the same on every track, and returns are of order 1.

    They are multiplied by the track's length, so that a lap pays 1 on any track, and divided by the standard deviation of the
    discounted returns so far. Only what the networks learn from is scaled; metrics show raw rewards.
    """

    def __init__(self, gamma: float, track_lengths: np.ndarray):
        self.gamma, self.track_lengths = gamma, track_lengths  # (N,)
        self.returns = np.zeros(len(track_lengths))  # (N,) discounted sums of each car's rewards so far
        self.moments = np.array([0.0, 1.0, 1e-4])  # mean, variance and count of all returns so far, in all processes

    def update(self, rewards, ended) -> None:
        """Take in the rewards and the ends (T, N) of these cars, and the statistics of the cars of other processes."""
        returns = np.empty_like(rewards)
        for t in range(len(rewards)):
            returns[t] = self.returns = self.returns * self.gamma + rewards[t] * self.track_lengths
            self.returns = np.where(ended[t], 0.0, self.returns)
        for mean, var, count in all_gather((float(returns.mean()), float(returns.var()), returns.size)):
            own_mean, own_var, own_count = self.moments.tolist()  # both sets together (Chan et al.)
            total, delta = own_count + count, mean - own_mean
            var = (own_var * own_count + var * count + delta * delta * (own_count * count / total)) / total
            self.moments = np.array([own_mean + delta * (count / total), var, total])

    @property
    def scale(self) -> np.ndarray:
        """What to multiply every car's rewards by (N,)."""
        return self.track_lengths / math.sqrt(self.moments[1] + 1e-8)

    def on_reset(self) -> None:
        self.returns = np.zeros_like(self.returns)

    def get_state(self) -> dict:
        return {"returns": self.returns, "moments": self.moments}

    def set_state(self, state: dict) -> None:
        self.returns, self.moments = np.array(state["returns"]), np.array(state["moments"])

    def merge_states(self, states: list[dict]) -> None:
        self.moments = np.array(states[0]["moments"])  # those of all processes, so any state has them


class Noise:
    """Standard normal noise for the actions of all cars; `memory` is its correlation with the noise of the last action."""

    def __init__(self, num_envs: int, memory: float):
        self.memory, self.last = memory, torch.zeros(num_envs, len(ACTION_LOW))

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        fresh = torch.randn(self.last.shape, generator=generator)
        self.last = self.memory * self.last + math.sqrt(1 - self.memory**2) * fresh
        return self.last

    def get_state(self) -> dict:
        return {"last": self.last}

    def set_state(self, state: dict) -> None:
        self.last = state["last"]


class ReplayBuffer:
    """The last actions of all cars, a ring (T, N) of raw observations and rewards, which are normalised and scaled when sampled."""

    ARRAYS = ("obs", "next_obs", "actions", "rewards", "discounts", "ended")

    def __init__(self, size: int, num_envs: int):
        self.rows, self.num_envs = size // num_envs, num_envs
        self.obs, self.next_obs = (torch.zeros(self.rows, num_envs, OBS_SIZE) for _ in range(2))  # (T, N, 14)
        self.actions = torch.zeros(self.rows, num_envs, len(ACTION_LOW))  # (T, N, 3)
        self.rewards, self.discounts = (torch.zeros(self.rows, num_envs) for _ in range(2))  # (T, N)
        self.ended = torch.zeros(self.rows, num_envs, dtype=torch.bool)
        self.filled = self.head = 0  # number of rows, and where the next one goes

    def add(self, obs, actions, rewards, next_obs, ended, infos: dict) -> None:
        """One action of all cars, and what it led to. Of an ended episode, the last observation is in infos."""
        t = self.head
        self.obs[t], self.actions[t] = obs, actions
        arrays = {"rewards": rewards, "next_obs": next_obs, "ended": ended, "discounts": infos["discount"]}
        for name, values in arrays.items():
            getattr(self, name)[t] = torch.from_numpy(values)
        for i in np.flatnonzero(ended):
            self.next_obs[t, i] = torch.from_numpy(infos["final_obs"][i])
        self.head, self.filled = (t + 1) % self.rows, min(self.filled + 1, self.rows)

    def sample(self, count: int, n_step: int, scale, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """`count` actions, uniformly, with the discounted rewards of n actions from there on, or fewer where the episode ends.

        next_obs is what followed the last of them, discounts the weight of its value. `scale` (N,) multiplies the rewards.
        """
        oldest = self.head - self.filled
        row = oldest + torch.randint(max(self.filled - n_step + 1, 1), (count,), generator=generator)
        car = torch.randint(self.num_envs, (count,), generator=generator)
        rewards, discounts, running = torch.zeros(count), torch.ones(count), torch.ones(count, dtype=torch.bool)
        first = last = row % self.rows * self.num_envs + car
        for k in range(min(n_step, self.filled)):
            here = (row + k) % self.rows * self.num_envs + car
            last = torch.where(running, here, last)
            rewards += running * discounts * self.rewards.view(-1)[here]
            discounts = torch.where(running, discounts * self.discounts.view(-1)[here], discounts)
            running = running & ~self.ended.view(-1)[here]
        return {
            "obs": self.obs.view(-1, OBS_SIZE)[first],
            "actions": self.actions.view(-1, len(ACTION_LOW))[first],
            "rewards": rewards * torch.from_numpy(scale.astype(np.float32))[car],
            "discounts": discounts,
            "next_obs": self.next_obs.view(-1, OBS_SIZE)[last],
        }

    def on_reset(self) -> None:
        """What comes next does not follow from the last row."""
        self.ended[self.head - 1] = True

    def get_state(self) -> dict:
        return {"head": self.head, **{name: getattr(self, name)[: self.filled] for name in self.ARRAYS}}

    def set_state(self, state: dict) -> None:
        self.head, self.filled = state["head"], len(state["obs"])
        for name in self.ARRAYS:
            getattr(self, name)[: self.filled] = state[name]


# == Losses and update =================================================================================================


def soft_target(rewards, discounts, next_values, next_logprobs, alpha):
    """n-step rewards plus the discounted soft value of what follows: the lower target critic minus alpha * log-probability. (B,)"""
    return rewards + discounts * (next_values.amin(0) - alpha * next_logprobs)


def critic_loss(values, targets):
    return 0.5 * (values - targets).square().mean(1).sum()


def actor_loss(values, logprobs, alpha):
    """The lower critic's value, plus the entropy weighted by alpha."""
    return (alpha * logprobs - values.amin(0)).mean()


def alpha_loss(log_alpha, logprobs, target_entropy: float):
    """Alpha increases while the entropy (-logprobs) is below its target, and decreases while it is above."""
    return -(log_alpha.exp() * (logprobs.mean() + target_entropy))


def make_optimizers(agent: Agent, args: Args) -> tuple[torch.optim.Adam, torch.optim.Adam]:
    """For the actor and alpha, and for the critics. With a single one, momentum would move the actor in the steps that skip it."""
    actor = [{"params": agent.actor.parameters(), "lr": args.actor_learning_rate}, {"params": [agent.log_alpha]}]
    return tuple(torch.optim.Adam(p, lr=args.learning_rate, fused=True) for p in (actor, agent.critics.parameters()))


def set_learning_rates(actor_optimizer, critic_optimizer, args: Args, fraction: float) -> None:
    groups = (*actor_optimizer.param_groups, *critic_optimizer.param_groups)  # actor, alpha, critics
    for group, rate in zip(groups, (args.actor_learning_rate, *[args.learning_rate] * 2), strict=True):
        group["lr"] = fraction * rate


def update(agent: Agent, actor_optimizer, critic_optimizer, samples: dict, args: Args, generator) -> dict[str, float]:
    """One step of the critics for every minibatch of the samples, and one of the actor and alpha for some. -> metrics

    Targets are computed for all samples at once, with the actor and the critics' targets as they are before these steps.
    """
    normalized_obs, normalized_next_obs = agent.normalize(samples["obs"]), agent.normalize(samples["next_obs"])
    noise, next_noise = torch.randn(2, *samples["actions"].shape, generator=generator)
    with torch.no_grad():
        next_actions, next_logprobs = agent.sample(normalized_next_obs, next_noise)
        next_values = agent.values(agent.critic_targets, normalized_next_obs, next_actions)
        alpha = agent.log_alpha.exp()
        targets = soft_target(samples["rewards"], samples["discounts"], next_values, next_logprobs, alpha)

    critic_losses, actor_losses = [], []
    parts = (values.chunk(args.updates) for values in (normalized_obs, samples["actions"], targets, noise))
    for i, (mb_obs, mb_actions, mb_targets, mb_noise) in enumerate(zip(*parts, strict=True)):
        loss = critic_loss(agent.values(agent.critics, mb_obs, mb_actions), mb_targets)
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        critic_losses.append(loss.detach())

        if i % args.policy_frequency == 0:
            alpha = agent.log_alpha.exp().detach()
            new_actions, logprobs = agent.sample(mb_obs, mb_noise)
            loss = actor_loss(agent.values(agent.critics, mb_obs, new_actions), logprobs, alpha)
            temperature_loss = alpha_loss(agent.log_alpha, logprobs.detach(), args.target_entropy)
            actor_optimizer.zero_grad()
            own = [*agent.actor.parameters(), agent.log_alpha]  # the critics do not learn from the actor's loss
            (loss + temperature_loss if args.autotune else loss).backward(inputs=own)
            actor_optimizer.step()
            numbers = loss.detach(), temperature_loss.detach(), alpha, -logprobs.detach().mean()
            actor_losses.append(torch.stack(numbers))
    with torch.no_grad():  # Polyak averaging; tau is per update: one step for all of them
        share = 1 - (1 - args.tau) ** args.updates
        torch._foreach_lerp_([*agent.critic_targets.parameters()], [*agent.critics.parameters()], share)
    average_over_processes(agent, actor_optimizer, critic_optimizer)

    names = ("train/actor_loss", "train/ent_coef_loss", "train/ent_coef", "train/entropy")
    metrics = dict(zip(names, torch.stack(actor_losses).mean(0).tolist(), strict=True))
    rate = critic_optimizer.param_groups[0]["lr"]
    return {"train/critic_loss": torch.stack(critic_losses).mean().item(), **metrics, "train/learning_rate": rate}


# == Train =============================================================================================================


def make_agent(args: Args) -> Agent:
    return Agent(args.hidden, args.init_std, args.init_throttle, args.init_alpha, args.hide_arc)


def read_args(command_line: str | None = None) -> Args:
    """The settings of this program's command line; or of one given as text, as in train(read_args("--slow-game"))."""
    return parse_args("sac", Args, Agent, PRESETS, __doc__, command_line)


def train(args: Args) -> dict:
    """A complete run: drive and learn, evaluate and save until it is finished or stopped. -> its summary"""
    torch.manual_seed(args.seed)
    # Run: the run folder, several processes, evaluations, checkpoints, the game's bridges
    with ThreadPoolExecutor(1) as other_core, Run("sac", args) as run:
        envs = RacerVectorEnv(
            run.num_envs, args.tracks, args.config_path, run.bridge_urls, args.start,
            progress=args.progress, off_road_penalty_scale=args.off_road_penalty_scale, action_repeat=args.action_repeat,
            gamma=args.gamma, stuck_ticks=args.stuck_ticks, stagger=True, first_car=run.first_car, retries=args.bridge_retries,
        )  # fmt: skip
        agent = make_agent(args)
        actor_optimizer, critic_optimizer = make_optimizers(agent, args)
        scaler = RewardScaler(args.gamma**args.action_repeat, envs.track_lengths)
        generator, noise = torch.Generator().manual_seed(run.seed), Noise(envs.num_envs, args.noise_memory)
        buffer = ReplayBuffer(args.buffer_size // run.processes, envs.num_envs)
        batch_size = math.ceil(args.batch_size / run.processes)  # every process samples its share
        rows_before_learning = max(args.n_step, min(math.ceil(args.learning_starts / args.steps_per_update), buffer.rows))
        components = {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer, "generator": generator}
        components |= {"agent": agent, "scaler": scaler, "noise": noise, "buffer": buffer}
        run.begin(envs, unsaved=() if args.save_buffer else ("buffer",), **components)  # new, or as saved (--resume)
        while not run.done:
            if args.anneal_lr:
                set_learning_rates(actor_optimizer, critic_optimizer, args, 1 - run.progress)
            history = []
            count = args.actions_per_iteration(run.steps)
            for _ in range(count):
                obs = torch.from_numpy(envs.observations)
                with run.clock("policy"), torch.no_grad():
                    actions, _ = agent.sample(agent.normalize(obs), noise.draw(generator))
                driving = other_core.submit(envs.step, to_box(actions).numpy())
                if args.updates > 0 and buffer.filled >= rows_before_learning:
                    with run.clock("learning"):
                        samples = buffer.sample(args.updates * batch_size, args.n_step, scaler.scale, generator)
                        history.append(update(agent, actor_optimizer, critic_optimizer, samples, args, generator))
                        run.check(history[-1])
                with run.clock("environment"):
                    next_obs, rewards, terminated, truncated, infos = driving.result()
                run.stats.step(infos)
                buffer.add(obs, actions, rewards, next_obs, terminated | truncated, infos)
                scaler.update(rewards[None], (terminated | truncated)[None])
            metrics = {name: float(np.mean([m[name] for m in history])) for name in history[0]} if history else {}
            run.step(count * args.steps_per_update, metrics)  # counts and logs; evaluates and saves when due
        return run.report()


@as_command
def main():
    return train(read_args())


if __name__ == "__main__":
    run_as_script(main)
