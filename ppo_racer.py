"""PPO for the top-down racer, whole in this file. It trains a driver that beats the game's published one.

    python ppo_racer.py --total-timesteps 2000000                    # 12 s: laps of 6.5 s on track-01
    python ppo_racer.py --random-tracks 24                           # 77 s: a driver for every track
    python ppo_racer.py --track-id track-01 track-02 track-03 --total-timesteps 8000000       # one driver for all three
    python ppo_racer.py --bridge-url ws://localhost:9876             # train in the real game (its bridge has to run)
    python ppo_racer.py --resume runs/NAME                           # go on after an interruption, bit for bit
    python ppo_racer.py --evaluate runs/NAME/best.pt --episodes 10   # laps and lap times of a trained driver
    python ppo_racer.py --export game/driver --checkpoint runs/NAME  # for the browser game: model.onnx
    torchrun --nproc_per_node=8 ppo_racer.py --num-envs 8192 --minibatch-size 8192           # on more cores or machines
    tensorboard --logdir runs

PPO (Schulman et al. 2017) repeats three steps: drive all cars for a few ticks with the policy as it is (`rollout`), work
out how much better each action went than expected (`make_batch`, `compute_gae`), and take a few optimiser steps toward the
better ones without moving far from the policy that drove (`ppo_loss`, `update`). `train` is the loop around them: begin there.

Shapes: T ticks of a rollout, N cars of this process, B = T * N samples. `obs` is raw, `normalized_obs` is normalised.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from callbacks_lite import (
    Count, Run, all_gather, average_gradients, leave, make_envs, make_generator, on_two_cores, run_command,
    world_size,
)  # fmt: skip
from racer_env import (
    ACTION_HIGH, ACTION_LOW, DEFAULT_CONFIG_PATH, OBS_SIZE, RacerVectorEnv, RewardScaler, obs_moments,
)  # fmt: skip

# == Args ==============================================================================================================


@dataclasses.dataclass
class Args:
    # -- run
    total_timesteps: Count = 2_000_000
    """environment steps of the whole run, all cars together"""
    seed: int = 1
    """seed of everything random: same seed, same command, same numbers"""
    start_from: Path | None = None
    """a new run that begins with the networks of this checkpoint or run folder"""
    resume: Path | None = None
    """go on from this run folder or checkpoint with its settings; --total-timesteps may extend it"""
    evaluate: Path | None = None
    """drive this checkpoint (or a run folder's best.pt) without noise instead of training"""
    episodes: Count = 10
    """with --evaluate: episodes per track"""
    json: Path | None = None
    """with --evaluate: also write the results to this file"""
    export: Path | None = None
    """write the driver of --checkpoint to this folder, as the browser game loads it (ONNX)"""
    checkpoint: Path | None = None
    """with --export: the checkpoint or run folder"""

    # -- env
    track_id: tuple[str, ...] = ("track-01",)
    """track, or several to train one driver on all: names or .json files"""
    random_tracks: int = 0
    """train on random-1 to random-N: a driver for every track, also for those it has never seen"""
    config_path: Path = DEFAULT_CONFIG_PATH
    """reward weights and episode limits"""
    start: str = "grid"
    """where episodes start: grid, or anywhere, which teaches recovering"""
    bridge_url: tuple[str, ...] = ()
    """train in the real game behind these URLs instead of the embedded engine"""
    slow_game: bool = False
    """the defaults of --bridge-url, but on the embedded engine, to try them without the game"""
    bridge_retries: int = 0
    """how often in a row to connect again when the bridge fails; 0: save a checkpoint and stop"""
    off_road_price: float = 1.0
    """multiply the config's offTrackPenalty by this while learning: more makes careful drivers"""
    patience: int = 0
    """truncate the episode of a car that has got no farther for so many ticks; 0: never"""
    num_envs: Count = 512
    """cars driven at once, all processes together; on a bridge every car is a connection"""

    # -- algorithm
    gamma: float = 0.98
    """discount per tick: 0.98 looks about 50 ticks (0.8 s) ahead"""
    gae_lambda: float = 0.95
    """how far advantages trust measured rewards (1) over the critic (0)"""
    clip_coef: float = 0.2
    """beyond this change of an action's probability ratio, the loss gives no more gain"""
    ent_coef: float = 0.0
    """entropy bonus; not needed on these tracks"""
    init_std: float = 0.5
    """first standard deviation of the inputs; learned from then on"""
    init_throttle: float = 1.0
    """first mean of the throttle, with the brake off; starting with throttle speeds up early learning"""
    hide_arc: bool = False
    """hide where on the track the car is, so that the networks cannot learn a track by heart"""
    hidden: Count = 64
    """width of the two hidden layers of actor and critic"""

    # -- optimisation
    learning_rate: float = 2e-3
    """Adam's step size at the start"""
    anneal_lr: bool = True
    """let the learning rate fall to 0 over the run"""
    rollout_steps: Count = 32
    """ticks per car between updates"""
    minibatch_size: Count = 1_024
    """samples per optimiser step, about (a rollout is cut into equal parts); all processes together"""
    update_epochs: Count = 2
    """passes over a rollout"""
    max_grad_norm: float = 0.5
    """longer gradients are scaled down to this length"""
    target_kl: float | None = None
    """end an update early once the policy has moved this far"""

    # -- logging and checkpoints
    run_dir: Path = Path("runs")
    """where run folders go"""
    run_name: str = ""
    """name of the run folder (default: algorithm, track, seed and time)"""
    eval_every: Count = 500_000
    """steps between evaluations: an episode per track from the grid, without noise"""
    checkpoint_every: Count = 400_000
    """steps between checkpoints; one comes at the end, on Ctrl+C and if the bridge fails"""
    tensorboard: bool = True
    """write TensorBoard events (metrics.csv is always written)"""

    def __post_init__(self):
        if self.minibatch_size > self.steps_per_iteration:
            raise ValueError(
                f"--minibatch-size is {self.minibatch_size}, but a rollout has only {self.steps_per_iteration} samples "
                f"(--num-envs {self.num_envs} x --rollout-steps {self.rollout_steps}): make it smaller"
            )

    @property
    def steps_per_iteration(self) -> int:
        return self.num_envs * self.rollout_steps


PRESETS = {  # other defaults, for commands that ask for them
    "slow game": {  # --bridge-url or --slow-game: steps are slow, so each is learned from more often
        "total_timesteps": 100_000, "num_envs": 64, "patience": 90, "minibatch_size": 256, "update_epochs": 8,
        "learning_rate": 1e-3, "eval_every": 10_000, "checkpoint_every": 10_000,
    },
    "several tracks": {"start": "anywhere", "hidden": 96},
    "random tracks": {  # --random-tracks: none of them is known by heart
        "total_timesteps": 8_000_000, "start": "anywhere", "off_road_price": 3.0, "hidden": 128, "hide_arc": True,
        "eval_every": 1_000_000, "checkpoint_every": 1_000_000,
    },
    "start from": {  # --start-from: a short run, which has to see all of its track
        "total_timesteps": 300_000, "start": "anywhere", "num_envs": 256, "minibatch_size": 512, "learning_rate": 1e-3,
        "eval_every": 100_000, "checkpoint_every": 100_000,
    },
}  # fmt: skip

# == Agent =============================================================================================================


class Agent(nn.Module):
    """Actor, critic and the normaliser of their observations: one state_dict drives.

    The policy is a Gaussian over the raw inputs (steer, throttle, brake) with one learned deviation each. A sample goes to
    the game as it is, and the game clamps it to the box. So the action whose probability is optimised is the action that
    was given; the clamp is a part of the environment. (Squashing with tanh instead makes full throttle and full lock, which
    a racing car uses most of the time, hard to reach.) Without noise the driver gives the mean.
    """

    NORM_EPSILON, NORM_CLIP = 1e-6, 4.0

    def __init__(self, hidden: int = 64, init_std: float = 0.5, init_throttle: float = 1.0, hide_arc: bool = False):
        super().__init__()
        self.actor = mlp(hidden, len(ACTION_LOW), output_gain=0.01)
        self.critic = mlp(hidden, 1, output_gain=1.0)
        self.log_std = nn.Parameter(torch.full((len(ACTION_LOW),), math.log(init_std)))
        with torch.no_grad():
            # The brake begins below 0, which the game clamps to 0.
            self.actor[-1].bias.copy_(torch.tensor([0.0, init_throttle, -init_throttle / 2]))
        # Fixed means and variances of observations. As buffers they are saved and exported with the weights.
        for name, values in zip(("obs_mean", "obs_var"), obs_moments(hide_arc), strict=True):
            self.register_buffer(name, torch.from_numpy(values))

    def normalize(self, obs):
        scaled = (obs - self.obs_mean) * torch.rsqrt(self.obs_var + self.NORM_EPSILON)
        return scaled.clamp(-self.NORM_CLIP, self.NORM_CLIP)

    def value(self, normalized_obs):
        return self.critic(normalized_obs).squeeze(-1)

    def forward(self, normalized_obs):
        """The driver without noise, (N, 14) -> inputs within the game's box (N, 3). This is what is exported."""
        return self.actor(normalized_obs).clamp(torch.tensor(ACTION_LOW), torch.tensor(ACTION_HIGH))

    @torch.inference_mode()
    def drive(self, obs: np.ndarray) -> np.ndarray:
        return self(self.normalize(torch.from_numpy(obs))).numpy()


def mlp(hidden: int, outputs: int, output_gain: float) -> nn.Sequential:
    return nn.Sequential(
        linear(OBS_SIZE, hidden),
        nn.ReLU(),
        linear(hidden, hidden),
        nn.ReLU(),
        linear(hidden, outputs, output_gain),
    )


def linear(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    """A layer with orthogonal weights."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def gaussian_logprob(noise, log_std):
    """log N(mean + std * noise; mean, std), summed over the action. By hand: torch.distributions takes six times as long."""
    return -0.5 * (noise * noise).sum(-1) - log_std.sum() - 0.5 * noise.shape[-1] * math.log(2 * math.pi)


def gaussian_entropy(log_std):
    return log_std.sum() + 0.5 * len(log_std) * math.log(2 * math.pi * math.e)


# == Rollout and advantages ============================================================================================


class Storage:
    """One rollout. `obs` has T + 1 rows: the last one is what the cars see after the last tick."""

    def __init__(self, steps: int, num_envs: int):
        self.obs = torch.zeros(steps + 1, num_envs, OBS_SIZE)  # (T + 1, N, 14)
        self.actions = torch.zeros(steps, num_envs, len(ACTION_LOW))  # (T, N, 3)
        self.logprobs = torch.zeros(steps, num_envs)  # (T, N), and so are the others
        self.rewards = np.zeros((steps, num_envs))
        self.terminated = np.zeros((steps, num_envs), bool)
        self.truncated = np.zeros((steps, num_envs), bool)
        self.final_obs: list[tuple[int, np.ndarray, np.ndarray]] = []  # (tick, cars, observations) of ended episodes


@torch.no_grad()
def rollout(agent: Agent, envs: RacerVectorEnv, storage: Storage, run: Run, generator: torch.Generator) -> None:
    """Drive all cars for T ticks from where they are, and leave everything that the update needs in storage."""
    steps, num_envs = storage.rewards.shape
    noise, std = torch.randn(steps, num_envs, len(ACTION_LOW), generator=generator), agent.log_std.exp()
    storage.obs[0] = torch.from_numpy(envs.observations)
    storage.final_obs.clear()
    for t in range(steps):
        with run.clock("policy"):
            storage.actions[t] = agent.actor(agent.normalize(storage.obs[t])) + std * noise[t]
        with run.clock("environment"):
            obs, rewards, terminated, truncated, infos = envs.step(storage.actions[t].numpy())
        run.stats.step(infos)
        storage.obs[t + 1] = torch.from_numpy(obs)
        storage.rewards[t], storage.terminated[t], storage.truncated[t] = rewards, terminated, truncated
        if "final_obs" in infos:  # obs is the next episode's first; this one ended elsewhere
            cars = np.flatnonzero(infos["_final_obs"])
            storage.final_obs.append((t, cars, np.stack(infos["final_obs"][cars])))
    storage.logprobs[:] = gaussian_logprob(noise, agent.log_std)  # of all ticks at once: the noise is known


def compute_gae(rewards, values, next_values, terminated, truncated, gamma: float, gae_lambda: float):
    """Generalised advantage estimation. All arrays (T, N) -> advantages, returns (T, N)

    A terminated episode has no future, so nothing is expected after it. A truncated one would have gone on: the critic's
    value of its last observation stands for the rest. Both reset the sum, because the next tick belongs to another episode.
    """
    td_errors = rewards + gamma * next_values * ~terminated - values
    decay = gamma * gae_lambda * ~(terminated | truncated)
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
    for t, cars, final_obs in storage.final_obs:  # of both kinds of end: compute_gae leaves out the terminated ones
        next_values[t, cars] = agent.value(agent.normalize(torch.from_numpy(final_obs))).numpy()

    scaler.update(storage.rewards, storage.terminated | storage.truncated, all_gather)
    rewards = storage.rewards * scaler.scale
    advantages, returns = compute_gae(
        rewards, values, next_values, storage.terminated, storage.truncated, args.gamma, args.gae_lambda
    )
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
    """The clipped objective: making good actions more probable, or bad ones less, gains nothing beyond the clip.

    Advantages are normalised in every minibatch. -> loss, and the log of the ratios (B,)
    """
    advantages = (advantages - advantages.mean()) / (advantages.std(unbiased=False) + 1e-8)
    logratio = logprobs - old_logprobs
    ratio = logratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages
    return -torch.minimum(unclipped, clipped).mean(), logratio


def approx_kl(logratio):
    """How far the policy has moved from the one that drove: an estimate of their divergence, never negative."""
    return (logratio.exp() - 1 - logratio).mean()


def minibatches(
    batch: dict[str, torch.Tensor], count: int, generator: torch.Generator
) -> list[dict[str, torch.Tensor]]:
    """The batch in so many equal parts, in a new order."""
    order = torch.randperm(len(batch["returns"]), generator=generator)
    parts = zip(*(values[order].tensor_split(count) for values in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


def actor_backward(agent: Agent, mb: dict[str, torch.Tensor], clip_coef: float, ent_coef: float):
    """The gradient of the actor. -> the policy's loss, and the log of the ratios (B,)"""
    noise = (mb["actions"] - agent.actor(mb["normalized_obs"])) * torch.exp(-agent.log_std)
    loss, logratio = ppo_loss(gaussian_logprob(noise, agent.log_std), mb["logprobs"], mb["advantages"], clip_coef)
    (loss - ent_coef * gaussian_entropy(agent.log_std)).backward()
    return loss.detach(), logratio.detach()


def critic_backward(agent: Agent, mb: dict[str, torch.Tensor]):
    """The gradient of the critic. -> its loss"""
    loss = 0.5 * (agent.value(mb["normalized_obs"]) - mb["returns"]).square().mean()
    loss.backward()
    return loss.detach()


def update(agent: Agent, optimizer, batch: dict, ent_coef: float, args: Args, generator) -> dict[str, float]:
    """Some epochs of minibatch steps on one rollout. -> metrics

    Actor and critic share no weights, so their gradients are worked out at the same time. (If you let them share layers, add
    the two losses and call backward once.)
    """
    parameters, policy_losses, value_losses, logratios = list(agent.parameters()), [], [], []
    count = max(1, round(len(batch["returns"]) * world_size() / args.minibatch_size))
    epochs = (minibatches(batch, count, generator) for _ in range(args.update_epochs))
    for mb in itertools.chain.from_iterable(epochs):  # one loop, which target_kl can end
        optimizer.zero_grad()
        (policy_loss, logratio), value_loss = on_two_cores(
            partial(actor_backward, agent, mb, args.clip_coef, ent_coef), partial(critic_backward, agent, mb)
        )
        policy_losses.append(policy_loss)
        value_losses.append(value_loss)
        logratios.append(logratio)
        if args.target_kl is not None and np.mean(all_gather(approx_kl(logratio).item())) > args.target_kl:
            break  # before the step that would take the policy farther
        average_gradients(optimizer)
        nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
        optimizer.step()

    logratio = torch.cat(logratios)
    policy_loss, value_loss = torch.stack(policy_losses).mean().item(), torch.stack(value_losses).mean().item()
    entropy_loss = -gaussian_entropy(agent.log_std).item()
    return {  # add yours here: a mean over the processes is logged, and one that is not finite ends the run
        "train/loss": policy_loss + ent_coef * entropy_loss + value_loss,
        "train/policy_gradient_loss": policy_loss,
        "train/value_loss": value_loss,
        "train/entropy_loss": entropy_loss,
        "train/approx_kl": approx_kl(logratio).item(),
        "train/clip_fraction": (logratio.exp() - 1).abs().gt(args.clip_coef).float().mean().item(),
        "train/clip_range": args.clip_coef,
        "train/std": agent.log_std.exp().mean().item(),
        "train/learning_rate": optimizer.param_groups[0]["lr"],
    }


# == Train =============================================================================================================


def make_agent(args: Args) -> Agent:
    return Agent(args.hidden, args.init_std, args.init_throttle, args.hide_arc)


def train(args: Args) -> dict:
    """A whole run: drive, learn, evaluate, save, until it is finished or stopped. -> what was reached"""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # more gain nothing on networks this small
    envs = make_envs(args)
    agent = make_agent(args)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    scaler = RewardScaler(args.gamma, envs.track_lengths)
    generator = make_generator(args.seed)
    storage = Storage(args.rollout_steps, envs.num_envs)
    parts = {"agent": agent, "optimizer": optimizer, "scaler": scaler, "envs": envs, "generator": generator}
    with Run("ppo", args, envs, parts) as run:  # restores the parts on --resume
        while not run.done:
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - run.progress)
            rollout(agent, envs, storage, run, generator)
            with run.clock("learning"):
                batch, metrics = make_batch(agent, storage, scaler, args)
                metrics |= update(agent, optimizer, batch, args.ent_coef, args, generator)
            run.advance(args.steps_per_iteration, metrics)
            if run.due(args.eval_every):
                run.evaluate(agent.drive)  # the best driver is saved as best.pt
            run.log()
            if run.due(args.checkpoint_every) or run.stopped:
                run.save("checkpoint.pt")
        return run.report()


def main() -> int:
    return run_command("ppo", Args, PRESETS, make_agent, train, __doc__)


if __name__ == "__main__":
    leave(main())
