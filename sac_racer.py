"""SAC for the top-down racer, whole in this file. It needs few steps, which counts where the game is slow.

    python sac_racer.py                                              # 59 s: laps of 6.5 s on track-01
    python sac_racer.py --slow-game                                  # as on a bridge: laps of 6.6 s after 60,000 steps
    python sac_racer.py --bridge-url ws://localhost:9876             # train in the real game (its bridge has to run)
    python sac_racer.py --resume runs/NAME                           # go on after an interruption, bit for bit
    python sac_racer.py --evaluate runs/NAME/best.pt --episodes 10   # laps and lap times of a trained driver
    python sac_racer.py --export game/driver --checkpoint runs/NAME  # for the browser game: model.onnx

SAC (Haarnoja et al. 2018) keeps recent experience in a replay buffer and learns from it many times. Two critics learn what an
action is worth (`critic_loss`): the rewards of the next n choices, and then what their slowly following targets expect of the
policy (`soft_target`). The actor learns actions that the critics value (`actor_loss`), with an entropy bonus whose weight
`alpha` is learned too (`alpha_loss`). The lower of the two critics counts, against overestimation. The policy drives from the
first step: there is no phase of random actions. `train` is the loop around them: begin there.

Shapes: T rows in the buffer, N cars of this process, B samples of a minibatch. `obs` is raw, `normalized_obs` is normalised.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import nn

from callbacks_lite import (
    Count, Run, all_gather, average_gradients, leave, make_envs, make_generator, mean_metrics, run_command, world_size,
)  # fmt: skip
from racer_env import (
    ACTION_HIGH, ACTION_LOW, DEFAULT_CONFIG_PATH, OBS_SIZE, RacerVectorEnv, RewardScaler, obs_moments,
)  # fmt: skip

# == Args ==============================================================================================================


@dataclasses.dataclass
class Args:
    # -- run
    total_timesteps: Count = 1_000_000
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
    num_envs: Count = 64
    """cars driven at once, all processes together; on a bridge every car is a connection"""

    # -- algorithm
    action_repeat: Count = 4
    """ticks a choice is kept while learning: one tick does too little to be judged (the finished driver chooses every tick)"""
    gamma: float = 0.97
    """discount per tick: 0.97 looks about 33 ticks (0.6 s) ahead"""
    n_step: Count = 5
    """choices whose rewards are measured before the critics' own expectation takes over"""
    tau: float = 0.01
    """how far the targets follow the critics with every update: small is stable, large is fast"""
    init_alpha: float = 0.01
    """first entropy coefficient (alpha)"""
    autotune: bool = True
    """let alpha learn to hold the entropy at --target-entropy; otherwise it stays as it was at the start"""
    target_entropy: float = -6.0
    """entropy of the three actions in [-1, 1] that alpha holds; lower gives a less random policy in the end"""
    noise_memory: float = 0.0
    """correlation of a choice's noise with the last one's: more of it tries things out for longer than a choice"""
    init_std: float = 0.5
    """first standard deviation of the actions before squashing; learned from then on, for every state"""
    init_throttle: float = 1.0
    """first mean of the throttle, with the brake off; starting with throttle speeds up early learning"""
    hide_arc: bool = False
    """hide where on the track the car is, so that the networks cannot learn a track by heart"""
    hidden: Count = 64
    """width of the two hidden layers of actor and critics"""

    # -- optimisation
    learning_rate: float = 1e-3
    """Adam's step size at the start, for critics and alpha"""
    actor_learning_rate: float = 1e-3
    """the same for the actor: a slow actor gives the critics time to follow"""
    anneal_lr: bool = True
    """let the learning rate fall to 0 over the run"""
    buffer_size: Count = 30_000
    """choices kept to learn from, all processes together; keeping only recent ones gave faster laps"""
    learning_starts: int = 5_000
    """learning begins after so many steps, or earlier if the buffer is full"""
    batch_size: Count = 256
    """samples per optimiser step, all processes together"""
    updates: int = 8
    """optimiser steps of the critics after every choice of all cars, made while the cars drive"""
    policy_frequency: Count = 2
    """updates of the critics per update of the actor"""

    # -- logging and checkpoints
    run_dir: Path = Path("runs")
    """where run folders go"""
    run_name: str = ""
    """name of the run folder (default: algorithm, track, seed and time)"""
    eval_every: Count = 100_000
    """steps between evaluations: an episode per track from the grid, without noise"""
    checkpoint_every: Count = 100_000
    """steps between checkpoints; one comes at the end, on Ctrl+C and if the bridge fails"""
    log_every: Count = 20_000
    """steps between rows of metrics; stopping, saving and evaluating wait for one"""
    save_buffer: bool = True
    """keep the replay buffer in the checkpoint; without it a resumed run has to fill a new one first"""
    tensorboard: bool = True
    """write TensorBoard events (metrics.csv is always written)"""

    def __post_init__(self):
        if self.buffer_size < self.num_envs * self.n_step:
            needed = f"{self.num_envs} cars times --n-step {self.n_step}"
            raise ValueError(f"--buffer-size is {self.buffer_size}, less than {needed}")
        if not 0 <= self.noise_memory < 1:
            raise ValueError(f"--noise-memory is {self.noise_memory}; it must be 0 or more, and less than 1")

    @property
    def steps_per_choice(self) -> int:
        return self.num_envs * self.action_repeat

    @property
    def choices_per_iteration(self) -> int:
        every = min(self.log_every, self.eval_every, self.checkpoint_every, self.total_timesteps)
        return max(1, round(every / self.steps_per_choice))


PRESETS = {  # other defaults, for commands that ask for them
    "slow game": {  # --bridge-url or --slow-game: steps are slow, so the run is short and is evaluated often
        "total_timesteps": 60_000, "num_envs": 8, "patience": 90, "buffer_size": 10_000, "learning_starts": 3_500,
        "actor_learning_rate": 8e-5, "anneal_lr": False, "tau": 0.1, "init_alpha": 0.001, "noise_memory": 0.8,
        "log_every": 2_000, "eval_every": 10_000, "checkpoint_every": 10_000,
    },
    "several tracks": {"start": "anywhere", "hidden": 96},
    "random tracks": {  # --random-tracks: none of them is known by heart
        "start": "anywhere", "off_road_price": 3.0, "hidden": 96, "hide_arc": True, "eval_every": 500_000,
    },
    "start from": {"total_timesteps": 300_000, "start": "anywhere", "learning_rate": 3e-4, "actor_learning_rate": 3e-4},
}  # fmt: skip
LOG_STD_RANGE = -5.0, 1.0  # of the policy before squashing
MOST_THROTTLE = 0.99  # where --init-throttle ends, of [-1, 1]: at 1 the mean before squashing would be infinite

# == Agent =============================================================================================================


class Agent(nn.Module):
    """Actor, critics, their targets and the normaliser of their observations: one state_dict drives.

    The policy is a Gaussian squashed by tanh: while learning, actions are in [-1, 1], and `to_inputs` stretches them to the
    game's box. Its entropy, and so the target entropy, is that of the actions in [-1, 1]. Without noise the driver gives the
    squashed mean.
    """

    NORM_EPSILON, NORM_CLIP = 1e-6, 4.0

    def __init__(self, hidden: int = 64, init_std=0.5, init_throttle=1.0, init_alpha=0.01, hide_arc: bool = False):
        super().__init__()
        size = len(ACTION_LOW)
        # Observation -> means and log deviations of the actions before squashing.
        self.actor = nn.Sequential(
            nn.Linear(OBS_SIZE, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 2 * size)
        )
        throttle = math.atanh(min(max(2 * init_throttle - 1, -MOST_THROTTLE), MOST_THROTTLE))
        with torch.no_grad():
            self.actor[-1].weight.mul_(0.01)  # so that the first policy does the same everywhere
            first = [0.0, throttle, -math.atanh(MOST_THROTTLE), *[math.log(init_std)] * size]
            self.actor[-1].bias.copy_(torch.tensor(first))
        # Observation and action -> what it is worth, by two critics. LayerNorm keeps values of unseen actions bounded.
        self.critics = nn.Sequential(
            TwinLinear(OBS_SIZE + size, hidden), nn.LayerNorm(hidden, elementwise_affine=False), nn.SiLU(),
            TwinLinear(hidden, hidden), nn.LayerNorm(hidden, elementwise_affine=False), nn.SiLU(),
            TwinLinear(hidden, 1),
        )  # fmt: skip
        self.critic_targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(init_alpha)))
        # Fixed means and variances of observations. As buffers they are saved and exported with the weights.
        for name, values in zip(("obs_mean", "obs_var"), obs_moments(hide_arc), strict=True):
            self.register_buffer(name, torch.from_numpy(values))

    def normalize(self, obs):
        scaled = (obs - self.obs_mean) * torch.rsqrt(self.obs_var + self.NORM_EPSILON)
        return scaled.clamp(-self.NORM_CLIP, self.NORM_CLIP)

    def sample(self, normalized_obs, noise):
        """Actions (B, 3) in [-1, 1] and their log-probabilities (B,)."""
        mean, log_std = self.actor(normalized_obs).chunk(2, dim=-1)
        return squashed_sample(mean, log_std.clamp(*LOG_STD_RANGE), noise)

    @staticmethod
    def values(critics, normalized_obs, actions):
        """What both critics expect: (2, B)"""
        return critics(torch.cat([normalized_obs, actions], dim=-1).expand(2, -1, -1)).squeeze(-1)

    def forward(self, normalized_obs):
        """The driver without noise, (N, 14) -> inputs within the game's box (N, 3). This is what is exported."""
        return to_inputs(torch.tanh(self.actor(normalized_obs)[:, : len(ACTION_LOW)]))

    @torch.inference_mode()
    def drive(self, obs: np.ndarray) -> np.ndarray:
        return self(self.normalize(torch.from_numpy(obs))).numpy()


class TwinLinear(nn.Module):
    """The same layer of two networks, which share no weights: (2, B, inputs) -> (2, B, outputs)"""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        twins = [nn.Linear(inputs, outputs) for _ in range(2)]
        self.weight = nn.Parameter(torch.stack([layer.weight.detach().T for layer in twins]))
        self.bias = nn.Parameter(torch.stack([layer.bias.detach()[None] for layer in twins]))

    def forward(self, x):
        return torch.baddbmm(self.bias, x, self.weight)


def to_inputs(actions: torch.Tensor) -> torch.Tensor:
    """Actions in [-1, 1] (N, 3) as the game's inputs, in its box."""
    low, high = torch.tensor(ACTION_LOW), torch.tensor(ACTION_HIGH)
    return (low + (actions + 1) * ((high - low) / 2)).clamp(low, high)


def squashed_sample(mean, log_std, noise):
    """tanh(mean + std * noise), and its log-density summed over the action.

    The density of a squashed variable is divided by the slope of the squashing, 1 - tanh(u)^2, written so that it holds
    where tanh(u) rounds to 1. By hand: torch.distributions takes several times as long.
    """
    u = mean + log_std.exp() * noise
    log_slope = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))
    logprobs = -0.5 * noise * noise - log_std - 0.5 * math.log(2 * math.pi) - log_slope
    return torch.tanh(u), logprobs.sum(-1)


# == Driving and the replay buffer =====================================================================================


@dataclasses.dataclass
class Transition:
    """The result of one choice of all cars. Shapes are (N,) unless noted."""

    next_obs: np.ndarray  # (N, 14) where the choice led: of an episode that ended, its last observation
    rewards: np.ndarray  # discounted sum over the ticks
    discounts: np.ndarray  # gamma^ticks, the weight of what comes after; 0 after a termination, which has no future
    ended: np.ndarray  # terminated or truncated


def drive(envs: RacerVectorEnv, inputs: np.ndarray, ticks: int, gamma: float, run: Run) -> Transition:
    """Give all cars these inputs for some ticks. Ticks after the end of an episode are not stored.

    A truncated episode would have gone on, so what follows its last observation counts; a terminated one has no future.
    """
    rewards, discounts = np.zeros(envs.num_envs), np.ones(envs.num_envs)
    terminated, going_on = np.zeros(envs.num_envs, bool), np.ones(envs.num_envs, bool)
    next_obs = np.zeros((envs.num_envs, OBS_SIZE), np.float32)
    for _ in range(ticks):
        obs, reward, term, trunc, infos = envs.step(inputs)
        run.stats.step(infos)
        rewards += going_on * discounts * reward
        discounts[going_on] *= gamma
        terminated |= going_on & term
        for i in np.flatnonzero(going_on & (term | trunc)):
            next_obs[i] = infos["final_obs"][i]
        going_on &= ~(term | trunc)
    next_obs[going_on] = obs[going_on]
    return Transition(next_obs, rewards, discounts * ~terminated, ~going_on)


class Noise:
    """Standard normal numbers for all cars' choices, after the first few; `memory` is the correlation of each with the last."""

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
    """The last choices of all cars, a ring (T, N): raw observations, raw rewards. They are normalised and scaled when drawn."""

    ARRAYS = ("obs", "next_obs", "actions", "rewards", "discounts", "ended")

    def __init__(self, size: int, num_envs: int):
        self.rows, self.num_envs = size // num_envs, num_envs
        self.obs, self.next_obs = (torch.zeros(self.rows, num_envs, OBS_SIZE) for _ in range(2))  # (T, N, 14)
        self.actions = torch.zeros(self.rows, num_envs, len(ACTION_LOW))  # (T, N, 3)
        self.rewards, self.discounts = (torch.zeros(self.rows, num_envs) for _ in range(2))  # (T, N)
        self.ended = torch.zeros(self.rows, num_envs, dtype=torch.bool)
        self.filled = self.head = 0  # rows there are, and where the next one goes

    def add(self, obs, actions, transition: Transition) -> None:
        """One choice of all cars, and what came of it."""
        t = self.head
        self.obs[t], self.actions[t] = obs, actions
        for name in ("next_obs", "rewards", "discounts", "ended"):
            getattr(self, name)[t] = torch.from_numpy(getattr(transition, name))
        self.head, self.filled = (t + 1) % self.rows, min(self.filled + 1, self.rows)

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
            "rewards": rewards * torch.from_numpy(scale.astype(np.float32))[car],
            "discounts": discounts,
            "next_obs": self.next_obs.view(-1, OBS_SIZE)[last],
        }

    def begin_anew(self) -> None:
        """All cars begin new episodes, though no step has ended the old ones: what comes next does not follow from those."""
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
    """The lower critic's value, and entropy at the price alpha."""
    return (alpha * logprobs - values.amin(0)).mean()


def alpha_loss(log_alpha, logprobs, target_entropy: float):
    """Alpha rises while the entropy (-logprobs) is below its target, and falls while it is above."""
    return -(log_alpha.exp() * (logprobs.mean() + target_entropy))


def make_optimizers(agent: Agent, args: Args) -> tuple[torch.optim.Adam, torch.optim.Adam]:
    """For the actor and alpha, and for the critics. With one for all, momentum would move the actor in the steps that skip it."""
    actor = [{"params": agent.actor.parameters(), "lr": args.actor_learning_rate}, {"params": [agent.log_alpha]}]
    return tuple(torch.optim.Adam(p, lr=args.learning_rate, fused=True) for p in (actor, agent.critics.parameters()))


def update(agent: Agent, actor_optimizer, critic_optimizer, samples: dict, args: Args, generator) -> dict[str, float]:
    """One step of the critics for every minibatch of the samples, and one of the actor and alpha for some. -> metrics

    Targets are worked out for all samples at once, with the actor and the critics' targets as they are before these steps.
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
        average_gradients(critic_optimizer)
        critic_optimizer.step()
        critic_losses.append(loss.detach())

        if i % args.policy_frequency == 0:
            alpha = agent.log_alpha.exp().detach()
            new_actions, logprobs = agent.sample(mb_obs, mb_noise)
            loss = actor_loss(agent.values(agent.critics, mb_obs, new_actions), logprobs, alpha)
            temperature_loss = alpha_loss(agent.log_alpha, logprobs.detach(), args.target_entropy)
            actor_optimizer.zero_grad()
            own = [*agent.actor.parameters(), agent.log_alpha]  # the critics do not learn from what the actor asks them
            (loss + temperature_loss if args.autotune else loss).backward(inputs=own)
            average_gradients(actor_optimizer)
            actor_optimizer.step()
            numbers = loss.detach(), temperature_loss.detach(), alpha, -logprobs.detach().mean()
            actor_losses.append(torch.stack(numbers))
    with torch.no_grad():  # Polyak averaging; tau is for every update: one move for all of them
        share = 1 - (1 - args.tau) ** args.updates
        torch._foreach_lerp_([*agent.critic_targets.parameters()], [*agent.critics.parameters()], share)

    names = ("train/actor_loss", "train/ent_coef_loss", "train/ent_coef", "train/entropy")
    metrics = dict(zip(names, torch.stack(actor_losses).mean(0).tolist(), strict=True))
    return {"train/critic_loss": torch.stack(critic_losses).mean().item(), **metrics}


# == Train =============================================================================================================


def make_agent(args: Args) -> Agent:
    return Agent(args.hidden, args.init_std, args.init_throttle, args.init_alpha, args.hide_arc)


def train(args: Args) -> dict:
    """A whole run: drive and learn, evaluate, save, until it is finished or stopped. -> what was reached"""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the other core drives the cars
    envs = make_envs(args)
    agent = make_agent(args)
    actor_optimizer, critic_optimizer = make_optimizers(agent, args)
    scaler = RewardScaler(args.gamma**args.action_repeat, envs.track_lengths)
    generator = make_generator(args.seed)
    noise = Noise(envs.num_envs, args.noise_memory)
    buffer = ReplayBuffer(args.buffer_size // world_size(), envs.num_envs)
    batch_size = math.ceil(args.batch_size / world_size())  # every process draws its share
    rows_before_learning = max(args.n_step, min(math.ceil(args.learning_starts / args.steps_per_choice), buffer.rows))
    parts = {"agent": agent, "actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer, "scaler": scaler}
    parts |= {"envs": envs, "generator": generator, "noise": noise, "buffer": buffer if args.save_buffer else None}
    with Run("sac", args, envs, parts) as run, ThreadPoolExecutor(1) as other_core:  # restores the parts on --resume
        while not run.done:
            if args.anneal_lr:
                groups = (*actor_optimizer.param_groups, *critic_optimizer.param_groups)  # actor, alpha, critics
                for group, rate in zip(groups, (args.actor_learning_rate, *[args.learning_rate] * 2), strict=True):
                    group["lr"] = rate * (1 - run.progress)
            history = []
            for _ in range(args.choices_per_iteration):
                obs = torch.from_numpy(envs.observations)
                with run.clock("policy"), torch.no_grad():
                    actions, _ = agent.sample(agent.normalize(obs), noise.draw(generator))
                    inputs = to_inputs(actions).numpy()
                driving = other_core.submit(drive, envs, inputs, args.action_repeat, args.gamma, run)
                if args.updates > 0 and buffer.filled >= rows_before_learning:
                    with run.clock("learning"):
                        samples = buffer.sample(args.updates * batch_size, args.n_step, scaler.scale, generator)
                        history.append(update(agent, actor_optimizer, critic_optimizer, samples, args, generator))
                        run.check(history[-1])
                with run.clock("environment"):
                    transition = driving.result()
                buffer.add(obs, actions, transition)
                scaler.update(transition.rewards[None], transition.ended[None], all_gather)
            metrics = mean_metrics(history) | {"train/learning_rate": critic_optimizer.param_groups[0]["lr"]}
            run.advance(args.choices_per_iteration * args.steps_per_choice, metrics)
            if run.due(args.eval_every):
                run.evaluate(agent.drive)  # the best driver is saved as best.pt
            run.log()
            if run.due(args.checkpoint_every) or run.stopped:
                run.save("checkpoint.pt")
        return run.report()


def main() -> int:
    return run_command("sac", Args, PRESETS, make_agent, train, __doc__)


if __name__ == "__main__":
    leave(main())
