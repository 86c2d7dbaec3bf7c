"""Stable-Baselines3 on our environment, to compare with: `python bench_racer.py --only peers`. Needs stable-baselines3.

Each entry of PEERS is trained as its users would: several RacerEnv in a DummyVecEnv, observations and rewards by VecNormalize.
Like our own runs it is evaluated every now and then, without noise from the grid.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from racer.game.config import load_config
from racer.training.evaluation import evaluate, summarize
from racer_env import RacerEnv, RacerVectorEnv

EVAL_EVERY = 5_000
PEERS = {  # label: algorithm, steps, cars, settings
    "SB3 PPO, tuned": ("PPO", 100_000, 8, {"n_steps": 512, "batch_size": 256, "gamma": 0.98}),
    "SB3 PPO, the game's authors": (
        "PPO", 100_000, 1, {"n_steps": 2048, "batch_size": 128, "n_epochs": 10, "gamma": 0.995, "ent_coef": 0.01},
    ),
    "SB3 SAC, 8 cars": (
        "SAC", 60_000, 8,
        {"learning_starts": 3_500, "gamma": 0.97, "train_freq": 4, "gradient_steps": 8, "buffer_size": 60_000,
         "policy_kwargs": {"net_arch": [64, 64]}},
    ),
    "SB3 SAC, the game's authors": (
        "SAC", 60_000, 1,
        {"learning_rate": 7.3e-4, "buffer_size": 300_000, "learning_starts": 10_000, "tau": 0.02, "gamma": 0.99,
         "train_freq": 8, "gradient_steps": 10},
    ),
}  # fmt: skip


def train_peer(label: str, seed: int) -> dict:
    """One run. -> its numbers, under the names of `bench_racer.run_command`"""
    try:
        import stable_baselines3
        from stable_baselines3.common.callbacks import BaseCallback
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.vec_env import VecNormalize
    except ImportError as error:
        raise ValueError("--only peers needs a package that is not installed: pip install stable-baselines3") from error

    class Evaluate(BaseCallback):
        """Every EVAL_EVERY steps an episode by the deterministic policy."""

        def _on_step(self) -> bool:
            if self.num_timesteps // EVAL_EVERY > (self.num_timesteps - cars) // EVAL_EVERY:
                result = drive()
                evaluations.append((self.num_timesteps, result["flying_lap_sec"], time.perf_counter() - begun))
                best.append(result)
            return True

    def drive() -> dict:
        def policy(observations):
            return model.predict(normalized.normalize_obs(observations), deterministic=True)[0]

        (episode,) = evaluate(policy, RacerVectorEnv(1), ["track-01"])
        return summarize([episode], load_config())

    begun = time.perf_counter()
    torch.set_num_threads(1)
    algorithm, steps, cars, settings = PEERS[label]
    normalized = VecNormalize(make_vec_env(RacerEnv, cars, seed=seed), gamma=settings["gamma"])
    model = getattr(stable_baselines3, algorithm)("MlpPolicy", normalized, seed=seed, device="cpu", **settings)
    evaluations, best = [], [drive()]
    model.learn(steps, callback=Evaluate())
    result = max(best, key=lambda result: result["mean_reward"])
    seconds = time.perf_counter() - begun
    return {"steps": steps, "seconds": seconds, "results": [result], "evaluations": evaluations}


def show_peers(runs: dict[str, list[dict]], held: dict[str, list[tuple[float, float]]]) -> None:
    """A table: from which step and second on laps are under the published driver's, and what was reached in the end."""
    count = len(next(iter(runs.values())))
    columns = f"{'holds from step':>16} {'from second':>12} {'reward':>8} {'lap':>9} {'seconds':>9}"
    print(f"\n{f'peers: track-01, the median of {count}':<60}{columns}")
    for label, found in runs.items():
        steps, seconds = (median(values) for values in zip(*held[label], strict=True))
        results = [run["results"][0] for run in found]
        reward = median(r["mean_reward"] for r in results)
        lap = median(r["flying_lap_sec"] or float("inf") for r in results)
        whole = median(run["seconds"] for run in found)
        print(f"{label:<60}{steps:>16,.0f} {seconds:>12.1f} {reward:>8.3f} {lap:>9.3f} {whole:>9.1f}", flush=True)
