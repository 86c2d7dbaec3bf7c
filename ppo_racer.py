"""PPO for the top-down racer in one file. It trains a driver that beats the game's published one.

    python ppo_racer.py --total-timesteps 2000000                    # a quarter of a minute: laps of 6.5 s
    python ppo_racer.py --random-tracks 44                           # a few minutes: a driver for every track
    python ppo_racer.py --track-id track-01 track-02 track-03 --total-timesteps 8000000       # one driver for all three
    python ppo_racer.py --game ../top-down-racer-02                  # train in the real game in this folder
    python ppo_racer.py --resume runs/NAME                           # continue after an interruption, bit-exact
    python -m racer.evaluate runs/NAME                               # laps and lap times of a trained driver
    tensorboard --logdir runs

PPO (Schulman et al. 2017) repeats three steps: drive all cars for a few ticks with the current policy (`rollout`), compute how
much better each action turned out than expected (`make_batch`, `compute_gae`), and take a few optimiser steps toward the better
ones without moving far from the policy that drove (`ppo_loss`, `update`). `train` is the loop around them: start reading there.

While learning, an action is held for `action_repeat` ticks, and progress is rewarded along the shortest line of the track.
Shapes: T actions of a rollout, N cars of this process, B = T * N samples. `obs` is raw, `normalized_obs` is normalised.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from torch import nn

from callbacks_lite import RaceStats
from racer.training.run import Run, all_gather, average_over_processes
from racer.training.settings import (
    Count, Fraction, NonNegative, Positive, Preset, Range, Settings, Whole, as_command, parse_args, run_as_script,
)  # fmt: skip
from racer_env import ACTION_HIGH, ACTION_LOW, OBS_SIZE, RacerVectorEnv, obs_moments

# == Args ==============================================================================================================


@dataclasses.dataclass
class Args(Settings):
    # -- run
    total_timesteps: Count = 2_000_000
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
    random_tracks: Annotated[Whole, Range(0, 500)] = 0
    """train on any-1 to any-N, random tracks of all scales, for a driver that handles tracks it has never seen"""
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
    num_envs: Annotated[Count, Range(1, 65_536)] = 128
    """cars driven in parallel, all processes together; on a bridge every car is a connection"""

    # -- algorithm
    action_repeat: Annotated[Count, Range(1, 100)] = 3
    """ticks for which an action is held while learning; the finished driver acts every tick"""
    gamma: Fraction = 0.92
    """discount factor per tick: 0.92 looks about 12 ticks (0.2 s) ahead; 0.98 is better with --progress centreline"""
    gae_lambda: Fraction = 0.95
    """GAE parameter per action: advantages rely on measured rewards (1) or on the critic (0)"""
    clip_coef: Positive = 0.2
    """PPO clip range for the probability ratio"""
    ent_coef: NonNegative = 0.0
    """weight of the entropy bonus; these tracks do not need one"""
    init_std: Positive = 0.5
    """initial standard deviation of the actions, which is then learned"""
    init_throttle: Fraction = 1.0
    """initial mean of the throttle, with the brake off; driving from the start speeds up early learning"""
    hide_arc: bool = False
    """hide the arc position from the networks, so that they cannot memorise a track"""
    hidden: Annotated[Count, Range(1, 4096)] = 64
    """width of the two hidden layers of actor and critic"""

    # -- optimisation
    learning_rate: NonNegative = 3e-3
    """Adam's initial learning rate"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to 0"""
    rollout_steps: Annotated[Count, Range(1, 65_536)] = 24
    """actions per car between updates"""
    minibatch_size: Count = 384
    """approximate minibatch size (a rollout is split into equal parts), all processes together"""
    update_epochs: Count = 2
    """epochs over each rollout"""
    max_grad_norm: Positive = 0.5
    """maximum norm of the gradient, for clipping"""
    target_kl: Annotated[float | None, Range(0, exclusive=True)] = None
    """end an update early when the approximate KL divergence exceeds this"""

    # -- logging and checkpoints
    run_dir: Path = Path("runs")
    """parent folder of run folders"""
    run_name: str = ""
    """name of the run folder; if empty: algorithm, track, seed and time"""
    eval_every: Count = 500_000
    """steps between evaluations: a deterministic episode per track from the grid"""
    checkpoint_every: Count = 400_000
    """steps between checkpoints; also saved at the end, on Ctrl+C and if the bridge fails"""
    tensorboard: bool = True
    """write TensorBoard events (metrics.csv is always written)"""
    pictures: bool = True
    """draw the race (race.html), racing lines and a replay"""
    wandb: str = ""
    """also log to this project of Weights & Biases (pip install wandb)"""

    def __post_init__(self):
        super().__post_init__()
        samples = self.num_envs * self.rollout_steps  # of a rollout
        self.require(samples <= 20_000_000, f"--num-envs x --rollout-steps is {samples}, more samples than fit into memory")
        found = f"--minibatch-size is {self.minibatch_size}, more than --num-envs x --rollout-steps, which is {samples} samples"
        self.require(self.minibatch_size <= samples, found)

    @property
    def steps_per_update(self) -> int:
        return self.num_envs * self.rollout_steps * self.action_repeat


PRESETS = (  # defaults that these flags change; later presets take precedence
    Preset("--track-id A B ...", lambda given: len(given.track_id or ()) > 1, {  # no arc: it means another place on each
        "start": "anywhere", "hidden": 128, "hide_arc": True, "num_envs": 129, "minibatch_size": 256,
    }),
    Preset("--random-tracks", lambda given: given.random_tracks, {  # no track is memorised
        "total_timesteps": 16_000_000, "start": "anywhere", "off_road_penalty_scale": 2.0, "gamma": 0.94, "hidden": 192,
        "hide_arc": True, "num_envs": 264, "minibatch_size": 792, "eval_every": 2_000_000, "checkpoint_every": 2_000_000,
    }),
    Preset("--start-from", lambda given: given.start_from, {  # short fine-tuning; starting anywhere covers the track
        "total_timesteps": 300_000, "start": "anywhere", "learning_rate": 1e-3, "eval_every": 100_000,
        "checkpoint_every": 100_000,
    }),
    Preset("--game, --bridge-url, --slow-game", lambda given: given.game or given.bridge_url or given.slow_game, {
        "total_timesteps": 100_000, "start": "grid", "num_envs": 16, "stuck_ticks": 90, "action_repeat": 1,
        "rollout_steps": 64, "minibatch_size": 128, "update_epochs": 8, "learning_rate": 1e-3, "eval_every": 10_000,
        "checkpoint_every": 10_000,
    }),
    Preset("--game", lambda given: given.game, {"bridge_retries": 10, "bridges": min(os.cpu_count() or 1, 256)}),
)  # fmt: skip

# == Agent =============================================================================================================


class Agent(nn.Module):
    """Actor and critic.

    The policy is a Gaussian over the raw actions (steer, throttle, brake). A sample goes to the game as it is, and the game clamps
    it to the box. So the action whose probability is optimised is the action that was given; the clamp is part of the
    environment. (Squashing with tanh instead makes full throttle and full lock, which a racing car uses most of the time, hard
    to reach.) The deterministic driver gives the mean.
    """

    NORM_EPSILON, NORM_CLIP = 1e-6, 4.0

    def __init__(self, hidden: int = 64, init_std: float = 0.5, init_throttle: float = 1.0, hide_arc: bool = False):
        super().__init__()
        # Observations are normalised with fixed means and variances, which are saved and exported with the weights.
        for name, values in zip(("obs_mean", "obs_var"), obs_moments(hide_arc), strict=True):
            self.register_buffer(name, torch.from_numpy(values))
        self.actor = mlp(hidden, len(ACTION_LOW), output_gain=0.01)
        self.critic = mlp(hidden, 1, output_gain=1.0)
        self.log_std = nn.Parameter(torch.full((len(ACTION_LOW),), math.log(init_std)))
        with torch.no_grad():
            # The brake starts below 0, which the game clamps to 0.
            self.actor[-1].bias.copy_(torch.tensor([0.0, init_throttle, -init_throttle / 2]))

    def normalize(self, obs):
        scaled = (obs - self.obs_mean) * torch.rsqrt(self.obs_var + self.NORM_EPSILON)
        return scaled.clamp(-self.NORM_CLIP, self.NORM_CLIP)

    def policy(self, normalized_obs):
        """The Gaussian over actions: its mean (B, 3), and its log standard deviation, here (3,), the same in every state."""
        return self.actor(normalized_obs), self.log_std

    def sample(self, normalized_obs, noise):
        """Actions (B, 3) from standard normal noise (B, 3), and their log-probabilities (B,)."""
        mean, log_std = self.policy(normalized_obs)
        return mean + log_std.exp() * noise, gaussian_logprob(noise, log_std)

    def logprob(self, normalized_obs, actions):
        """Log-probabilities (B,) of actions (B, 3), and the entropy of the policy."""
        mean, log_std = self.policy(normalized_obs)
        return gaussian_logprob((actions - mean) * torch.exp(-log_std), log_std), gaussian_entropy(log_std)

    def value(self, normalized_obs):
        return self.critic(normalized_obs).squeeze(-1)

    def forward(self, normalized_obs):
        """The deterministic driver, (N, 14) -> actions within the game's box (N, 3). This is what is exported."""
        return self.policy(normalized_obs)[0].clamp(torch.tensor(ACTION_LOW), torch.tensor(ACTION_HIGH))

    @torch.inference_mode()
    def drive(self, obs: np.ndarray) -> np.ndarray:
        """Raw observations (N, 14) -> deterministic actions (N, 3)."""
        return self(self.normalize(torch.from_numpy(obs))).numpy()


def mlp(hidden: int, outputs: int, output_gain: float) -> nn.Sequential:
    return nn.Sequential(
        linear(OBS_SIZE, hidden), nn.ReLU(), linear(hidden, hidden), nn.ReLU(), linear(hidden, outputs, output_gain)
    )  # fmt: skip


def linear(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    """A layer with orthogonal weights."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def gaussian_logprob(noise, log_std):
    """log N(mean + std * noise; mean, std), summed over the action. torch.distributions would take six times as long."""
    return (-0.5 * noise * noise - log_std).sum(-1) - 0.5 * noise.shape[-1] * math.log(2 * math.pi)


def gaussian_entropy(log_std):
    return log_std.sum(-1).mean() + 0.5 * log_std.shape[-1] * math.log(2 * math.pi * math.e)


# == Reward scale, rollout and advantages ==============================================================================


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


class Storage:
    """One rollout. `obs` has T + 1 rows: the last one is what the cars see after the last action."""

    def __init__(self, steps: int, num_envs: int):
        self.obs = torch.zeros(steps + 1, num_envs, OBS_SIZE)  # (T + 1, N, 14)
        self.actions = torch.zeros(steps, num_envs, len(ACTION_LOW))  # (T, N, 3)
        self.logprobs = torch.zeros(steps, num_envs)  # (T, N)
        self.rewards = np.zeros((steps, num_envs))
        self.discounts = np.zeros((steps, num_envs))  # of what follows; 0 after a termination
        self.ended = np.zeros((steps, num_envs), bool)
        self.final_obs = torch.zeros(steps, num_envs, OBS_SIZE)  # where an episode ended: its last observation


@torch.no_grad()
def rollout(agent: Agent, envs: RacerVectorEnv, storage: Storage, stats: RaceStats, clock, generator) -> None:
    """Drive all cars for T actions from where they are, and leave everything that the update needs in storage."""
    steps, num_envs = storage.rewards.shape
    noise = torch.randn(steps, num_envs, len(ACTION_LOW), generator=generator)
    storage.obs[0] = torch.from_numpy(envs.observations)
    for t in range(steps):
        with clock("policy"):
            storage.actions[t], storage.logprobs[t] = agent.sample(agent.normalize(storage.obs[t]), noise[t])
        with clock("environment"):
            obs, rewards, terminated, truncated, infos = envs.step(storage.actions[t].numpy())
        stats.step(infos)
        storage.obs[t + 1] = torch.from_numpy(obs)
        storage.rewards[t], storage.discounts[t], storage.ended[t] = rewards, infos["discount"], terminated | truncated
        if "final_obs" in infos:  # obs already belongs to the next episode
            cars = np.flatnonzero(infos["_final_obs"])
            storage.final_obs[t, cars] = torch.from_numpy(np.stack(infos["final_obs"][cars]))


def compute_gae(rewards, values, next_values, discounts, ended, gae_lambda: float):
    """Generalised advantage estimation. All arrays (T, N) -> advantages, returns (T, N)

    A terminated episode has no future: its discount is 0. A truncated one would have continued: the critic's value of its last
    observation is used for the rest. Both reset the sum, because the next action belongs to another episode.
    """
    td_errors = rewards + discounts * next_values - values
    decay = discounts * gae_lambda * ~ended
    advantages = np.zeros_like(td_errors)
    advantage = np.zeros_like(td_errors[0])
    for t in reversed(range(len(td_errors))):
        advantage = td_errors[t] + decay[t] * advantage
        advantages[t] = advantage
    return advantages, advantages + values


@torch.no_grad()
def make_batch(agent: Agent, storage: Storage, scaler: RewardScaler, args: Args):
    """What the update learns from: advantages and returns of scaled rewards. -> tensors (B, ...) by name, metrics"""
    normalized_obs = agent.normalize(storage.obs)
    all_values = agent.value(normalized_obs).numpy().astype(np.float64)  # (T + 1, N)
    values, next_values = all_values[:-1], all_values[1:].copy()
    ended = storage.ended
    if ended.any():
        next_values[ended] = agent.value(agent.normalize(storage.final_obs[torch.from_numpy(ended)])).numpy()

    scaler.update(storage.rewards, ended)
    rewards = storage.rewards * scaler.scale
    advantages, returns = compute_gae(rewards, values, next_values, storage.discounts, ended, args.gae_lambda)
    batch = {
        "normalized_obs": normalized_obs[:-1].reshape(-1, OBS_SIZE),
        "actions": storage.actions.reshape(-1, len(ACTION_LOW)),
        "logprobs": storage.logprobs.reshape(-1),
        "advantages": torch.from_numpy(advantages.astype(np.float32)).reshape(-1),
        "returns": torch.from_numpy(returns.astype(np.float32)).reshape(-1),
    }
    return batch, {"train/explained_variance": explained_variance(values, returns)}


def explained_variance(values, returns) -> float:
    """1: a perfect prediction; 0: no better than a constant."""
    variance = returns.var()
    return float(1 - (returns - values).var() / variance) if variance > 0 else 0.0


# == Loss and update ===================================================================================================


def ppo_loss(logprobs, old_logprobs, advantages, clip_coef: float):
    """The clipped surrogate objective: beyond the clip range, making an action more or less probable gains nothing more.

    Advantages are normalised in every minibatch. -> loss, and the log of the ratios (B,)
    """
    advantages = (advantages - advantages.mean()) / (advantages.std(unbiased=False) + 1e-8)
    logratio = logprobs - old_logprobs
    ratio = logratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages
    return -torch.minimum(unclipped, clipped).mean(), logratio


def approx_kl(logratio):
    """An estimate of the KL divergence from the policy that drove, never negative (Schulman 2020)."""
    return (logratio.exp() - 1 - logratio).mean()


def minibatches(batch: dict[str, torch.Tensor], count: int, generator) -> list[dict[str, torch.Tensor]]:
    """The batch in `count` equal parts, shuffled."""
    order = torch.randperm(len(batch["returns"]), generator=generator)
    parts = zip(*(values[order].tensor_split(count) for values in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


def update(agent: Agent, optimizer, batch: dict, ent_coef: float, args: Args, generator) -> dict[str, float]:
    """Several epochs of minibatch steps on one rollout. -> metrics"""
    parameters, policy_losses, value_losses, logratios = list(agent.parameters()), [], [], []
    count = max(1, round(args.num_envs * args.rollout_steps / args.minibatch_size))
    epochs = (minibatches(batch, count, generator) for _ in range(args.update_epochs))
    for mb in itertools.chain.from_iterable(epochs):  # one loop, which target_kl can end
        logprobs, entropy = agent.logprob(mb["normalized_obs"], mb["actions"])
        policy_loss, logratio = ppo_loss(logprobs, mb["logprobs"], mb["advantages"], args.clip_coef)
        value_loss = 0.5 * (agent.value(mb["normalized_obs"]) - mb["returns"]).square().mean()
        policy_losses.append(policy_loss.detach())
        value_losses.append(value_loss.detach())
        logratios.append(logratio.detach())
        if args.target_kl is not None and approx_kl(logratios[-1]).item() > args.target_kl:
            break  # before the step that would move the policy farther
        optimizer.zero_grad()
        (policy_loss - ent_coef * entropy + value_loss).backward()
        nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
        optimizer.step()
    average_over_processes(agent, optimizer)

    logratio = torch.cat(logratios)
    policy_loss, value_loss = torch.stack(policy_losses).mean().item(), torch.stack(value_losses).mean().item()
    with torch.no_grad():
        log_std = agent.policy(mb["normalized_obs"])[1]
        entropy_loss = -gaussian_entropy(log_std).item()
    return {  # add metrics here: their mean over the processes is logged; NaN or infinity stops the run
        "train/loss": policy_loss + ent_coef * entropy_loss + value_loss,
        "train/policy_gradient_loss": policy_loss,
        "train/value_loss": value_loss,
        "train/entropy_loss": entropy_loss,
        "train/approx_kl": approx_kl(logratio).item(),
        "train/clip_fraction": (logratio.exp() - 1).abs().gt(args.clip_coef).float().mean().item(),
        "train/clip_range": args.clip_coef,
        "train/std": log_std.exp().mean().item(),
        "train/learning_rate": optimizer.param_groups[0]["lr"],
    }


# == Train =============================================================================================================


def make_agent(args: Args) -> Agent:
    return Agent(args.hidden, args.init_std, args.init_throttle, args.hide_arc)


def read_args(command_line: str | None = None) -> Args:
    """The settings of this program's command line; or of one given as text, as in train(read_args("--random-tracks 44"))."""
    return parse_args("ppo", Args, Agent, PRESETS, __doc__, command_line)


def train(args: Args) -> dict:
    """A complete run: drive, learn, evaluate and save until it is finished or stopped. -> its summary"""
    torch.manual_seed(args.seed)
    with Run("ppo", args) as run:  # the run folder, several processes, evaluations, checkpoints, the game's bridges
        envs = RacerVectorEnv(
            run.num_envs, args.tracks, args.config_path, run.bridge_urls, args.start,
            progress=args.progress, off_road_penalty_scale=args.off_road_penalty_scale, action_repeat=args.action_repeat,
            gamma=args.gamma, stuck_ticks=args.stuck_ticks, stagger=True, first_car=run.first_car, retries=args.bridge_retries,
        )  # fmt: skip
        agent = make_agent(args)
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
        scaler = RewardScaler(args.gamma**args.action_repeat, envs.track_lengths)
        generator = torch.Generator().manual_seed(run.seed)
        storage = Storage(args.rollout_steps, envs.num_envs)
        run.begin(envs, agent=agent, optimizer=optimizer, scaler=scaler, generator=generator)  # new, or as saved (--resume)
        while not run.done:
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - run.progress)
            rollout(agent, envs, storage, run.stats, run.clock, generator)
            with run.clock("learning"):
                batch, metrics = make_batch(agent, storage, scaler, args)
                metrics |= update(agent, optimizer, batch, args.ent_coef, args, generator)
            run.step(args.steps_per_update, metrics)  # counts and logs; evaluates and saves when due
        return run.report()


@as_command
def main():
    return train(read_args())


if __name__ == "__main__":
    run_as_script(main)
