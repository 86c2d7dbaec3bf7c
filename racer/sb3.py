"""Stable-Baselines3 on this environment: a VecEnv of the batched engine, and SB3's algorithms as peers of the trainers.

    from racer.sb3 import make_vec_env
    model = PPO("MlpPolicy", VecNormalize(make_vec_env(64)))           # needs: pip install stable-baselines3

    python -m racer.sb3 "ppo tuned" --seed 1            # trains a peer and leaves a run folder like ours, for racer.experiment

Each of PEERS is trained as its users would: several cars, observations and rewards by VecNormalize. Like our own runs it is
evaluated every now and then, deterministically from the grid.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import tyro

from callbacks_lite import MetricsLogger
from racer.game.checks import UserError
from racer.training.checkpoints import lock_folder
from racer.training.evaluation import eval_metrics, evaluate, lines_of, one_thread, summarize
from racer.training.settings import as_command, run_as_script
from racer.training.terminal import print_safely
from racer_env import RacerVectorEnv

try:
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import VecEnv, VecNormalize
except ImportError:
    stable_baselines3, BaseCallback, VecEnv = None, object, object

EVAL_EVERY = 5_000
PEERS = {  # name: algorithm, steps, cars, settings
    "ppo tuned": ("PPO", 100_000, 8, {"n_steps": 512, "batch_size": 256, "gamma": 0.98}),
    "ppo authors": (  # of the game
        "PPO", 100_000, 1, {"n_steps": 2048, "batch_size": 128, "n_epochs": 10, "gamma": 0.995, "ent_coef": 0.01},
    ),
    "sac authors": (
        "SAC", 60_000, 1,
        {"learning_rate": 7.3e-4, "buffer_size": 300_000, "learning_starts": 10_000, "tau": 0.02, "gamma": 0.99,
         "train_freq": 8, "gradient_steps": 10},
    ),
}  # fmt: skip


class RacerVecEnv(VecEnv):
    """RacerVectorEnv as a VecEnv of Stable-Baselines3. Infos hold what SB3 reads, and the game's keys."""

    def __init__(self, envs: RacerVectorEnv):
        self.envs, self._actions = envs, None
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> np.ndarray:
        seed = self._seeds[0]
        self._reset_seeds()
        return self.envs.reset(seed=seed)[0]

    def step_async(self, actions) -> None:
        self._actions = actions

    def step_wait(self):
        observations, rewards, terminated, truncated, found = self.envs.step(self._actions)
        done, keys = terminated | truncated, [key for key in found if f"_{key}" in found and isinstance(found[key], np.ndarray)]
        infos = [{key: found[key][i] for key in keys if key != "final_obs"} for i in range(self.num_envs)]
        for i in np.flatnonzero(done):
            infos[i]["terminal_observation"] = found["final_obs"][i]
            infos[i]["TimeLimit.truncated"] = bool(truncated[i])
            infos[i]["episode"] = {key: found["episode"][key][i] for key in ("r", "l", "t")}
        return observations, rewards.astype(np.float32), done, infos

    def close(self) -> None:
        self.envs.close()

    def get_attr(self, attr_name, indices=None) -> list:
        return [getattr(self.envs, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name, value, indices=None) -> None:
        setattr(self.envs, attr_name, value)

    def env_method(self, method_name, *args, indices=None, **kwargs) -> list:
        return [getattr(self.envs, method_name)(*args, **kwargs)] * len(list(self._get_indices(indices)))

    def env_is_wrapped(self, wrapper_class, indices=None) -> list[bool]:
        own = wrapper_class.__name__ == "Monitor"  # whose "episode" is in the infos
        return [own] * len(list(self._get_indices(indices)))


def make_vec_env(num_envs: int = 8, track_id="track-01", seed: int | None = None, **settings) -> RacerVecEnv:
    """Cars in one batched engine as an SB3 VecEnv; settings: those of RacerVectorEnv."""
    if stable_baselines3 is None:
        raise UserError("this needs a package that is not installed: pip install stable-baselines3")
    envs = RacerVecEnv(RacerVectorEnv(num_envs, track_id, **settings))
    envs.seed(seed)
    return envs


# == Peers =============================================================================================================


class Evaluate(BaseCallback):
    """Every EVAL_EVERY steps an episode by the deterministic policy; the best one is kept."""

    def __init__(self, logger: MetricsLogger, begun: float):
        super().__init__()
        self.log, self.begun, self.best, self.next = logger, begun, None, 0
        self.envs = RacerVectorEnv(1)

    def _on_step(self) -> bool:
        if self.num_timesteps >= self.next:
            self.next = (self.num_timesteps // EVAL_EVERY + 1) * EVAL_EVERY
            normalize = self.training_env.normalize_obs
            episodes = evaluate(lambda obs: self.model.predict(normalize(obs), deterministic=True)[0], self.envs, ["track-01"])
            results = [summarize(episodes, self.envs.config)]
            for name, value in eval_metrics(results).items():
                self.log.record(name, value)
            self.log.record("time/fps", self.num_timesteps / (time.perf_counter() - self.begun))
            self.log.dump(self.num_timesteps)
            print_safely(f"{self.num_timesteps:>11,}  {lines_of(results)[0]}")
            if self.best is None or results[0]["mean_reward"] > self.best[0]["mean_reward"]:
                self.best = results
        return True


@dataclasses.dataclass
class Args:
    peer: tyro.conf.Positional[str]
    """which one: see PEERS"""
    seed: int = 1
    """random seed"""
    total_timesteps: int | None = None
    """environment steps (default: the peer's own)"""
    run_dir: Path = Path("runs")
    """parent folder of run folders"""
    run_name: str = ""
    """name of the run folder"""


def train_peer(args: Args) -> dict:
    """One run. -> its summary, as our trainers write it"""
    if args.peer not in PEERS:
        raise UserError(f"unknown peer {args.peer!r}. Available: {', '.join(PEERS)}")
    algorithm, steps, cars, settings = PEERS[args.peer]
    begun, steps = time.perf_counter(), args.total_timesteps or steps
    envs = VecNormalize(make_vec_env(cars, seed=args.seed), gamma=settings["gamma"])
    folder = args.run_dir / (args.run_name or f"sb3-{args.peer.replace(' ', '-')}-s{args.seed}")
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder), one_thread():
        (folder / "metrics.csv").unlink(missing_ok=True)  # a peer that was interrupted begins again
        logger = MetricsLogger(folder, tensorboard=False)
        callback = Evaluate(logger, begun)
        model = getattr(stable_baselines3, algorithm)("MlpPolicy", envs, seed=args.seed, device="cpu", **settings)
        model.learn(steps, callback=callback)
        callback.next = 0
        callback.on_step()  # and at the end
        logger.close()
        seconds = time.perf_counter() - begun
        summary = {"run_folder": str(folder), "steps": model.num_timesteps, "finished": True, "saved": True, "seconds": seconds}
        summary |= {"steps_per_sec": model.num_timesteps / seconds, "results": callback.best}
        (folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    envs.close()
    return summary


@as_command
def main():
    return train_peer(tyro.cli(Args, prog="python -m racer.sb3", description=__doc__))


if __name__ == "__main__":
    run_as_script(main)
