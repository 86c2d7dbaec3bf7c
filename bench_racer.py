"""How fast it is, measured on this machine: the environment, learning alone, and training from nothing to a fast lap.

    python bench_racer.py                                     # all three tables, about two and a half minutes
    python bench_racer.py --only environment                  # the first, 20 seconds
    python bench_racer.py --only training --runs 3            # medians of three seeds
    python bench_racer.py --compare                           # and Stable-Baselines3 beside it, if it is installed
    python bench_racer.py --bridge-url ws://localhost:9876    # the real game, 1 and --num-envs connections
    python bench_racer.py --json out.json                     # every number, for a machine to read

Every row is the median of its repeats, beside their spread: (fastest - slowest) / median.

    environment  steps/s of the embedded engine with 1 to 4,096 cars; within a repeat, --steps calls of step() are timed
                 after --warmup that are not. What drives the cars is not timed
    learning     optimiser updates/s of each algorithm on samples that are there already, at its default settings
    training     each algorithm's default command as a process of its own, from its start to its end: steps/s, the seconds
                 to a lap faster than the published driver's 7.367 s on track-01, and where the time of a step goes

Exit code: 0 if the environment's fastest row reaches --target steps/s, 1 if not, 2 if something could not be measured
(no bridge, a bad flag).

    from bench_racer import run_benchmark
    run_benchmark(steps=500, target=100_000, warmup=50, num_envs=256)     # one row as a dict
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from callbacks_lite import PUBLISHED_LAP_TICKS, evaluate
from racer_env import BridgeError, RacerVectorEnv
from racer_sim import RacerSim

PUBLISHED_BRIDGE_STEPS_PER_SEC = 3_980  # what the game's authors report for their bridge on a desktop, one connection
CAR_COUNTS = (1, 16, 64, 256, 1_024, 4_096)
EMBEDDED_TARGET, BRIDGE_TARGET = 1_000_000.0, 1_000.0
ALL_TRACKS = ("track-01", "track-02", "track-03")
ALGORITHMS = ("ppo", "sac")
LEARNING_S = 1.0  # how long a repeat of learning takes
LAP_MARK = "7.367 s"  # the published driver's lap
HERE = Path(__file__).resolve().parent


@dataclasses.dataclass
class Args:
    """Measure the environment, learning and training; or the real game behind a bridge."""

    only: tuple[Literal["environment", "learning", "training"], ...] = ("environment", "learning", "training")
    """the tables to measure"""
    compare: bool = False
    """measure Stable-Baselines3 as well, on the same embedded engine (pip install stable-baselines3)"""
    compare_seconds: float = 120.0
    """give up on a lap of Stable-Baselines3 after this long"""
    runs: int = 1
    """training: runs of each algorithm, with seeds 1, 2, ...; the median one is reported"""
    total_timesteps: int | None = None
    """training: steps of a run (default: each algorithm's own)"""
    bridge_url: tuple[str, ...] = ()
    """measure the real game at these URLs instead of the embedded engine"""
    num_envs: int = 8
    """bridge: number of connections of the second row"""
    track_id: str = "track-01"
    """track to drive on"""
    steps: int = 400
    """timed steps a repeat; each moves all cars of the row"""
    warmup: int = 100
    """steps before the timing starts: cars get up to speed, memory and caches settle"""
    repeats: int = 3
    """repeats a row; the median one is reported"""
    target: float | None = None
    """steps/s that the fastest row has to reach; default 1,000,000 embedded, 1,000 on a bridge"""
    json: Path | None = None
    """also write the numbers to this file"""

    def __post_init__(self):
        for name, least in (("num_envs", 1), ("steps", 1), ("warmup", 0), ("repeats", 1), ("runs", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be {least} or more")
        if self.compare and importlib.util.find_spec("stable_baselines3") is None:
            raise ValueError("--compare needs Stable-Baselines3, which is not installed: pip install stable-baselines3")


# -- drivers: what the cars do while they are measured -------------------------------------------------------------------


def drive(observations: np.ndarray) -> np.ndarray:
    """Laps at a fair pace: steer to the longer side, slow down for what is near ahead. (N, 14) -> (N, 3)"""
    ahead, speed = observations[:, 4], observations[:, 9] * 160
    turn = observations[:, 6] - observations[:, 2] + 0.7 * (observations[:, 5] - observations[:, 3])
    wanted = 25 + 100 * ahead
    return np.stack([np.clip(-3 * turn, -1, 1), speed < wanted, speed > wanted + 10], axis=1).astype(np.float64)


def lean(observations: np.ndarray) -> np.ndarray:
    """Into the nearer wall and along it. (N, 14) -> (N, 3)"""
    side = np.where(observations[:, 0] < observations[:, 8], 0.35, -0.35)  # ray 0 looks to the right, ray 8 to the left
    return np.stack([side, np.full(len(side), 0.6), np.zeros(len(side))], axis=1)


# -- 1 the environment ---------------------------------------------------------------------------------------------------


class BareEngine(RacerSim):
    """The engine with what is measured of an environment."""

    def reset(self, cars=None, seed=None):
        return super().reset(cars), {}

    def close(self) -> None:
        pass


def run_benchmark(
    steps: int = 400,
    target: float = 0.0,
    warmup: int = 100,
    num_envs: int = 1,
    track_id="track-01",
    bridge_url=None,
    driver=drive,
    engine_only: bool = False,
    repeats: int = 3,
) -> dict:
    """One row: steps/s of all cars together, and the latency of one step() call. The median repeat by steps/s."""
    tracks = [track_id] if isinstance(track_id, str) else list(track_id)
    start = "grid" if bridge_url else "anywhere"  # spread over the track, as in training
    envs = (
        BareEngine(num_envs, tracks, start=start)
        if engine_only
        else RacerVectorEnv(num_envs, tracks, None, bridge_url, start)
    )
    try:
        results = sorted(
            (_measure(envs, steps, warmup, num_envs, driver) for _ in range(repeats)), key=lambda r: r["steps_per_sec"]
        )
    finally:
        envs.close()
    result = results[(len(results) - 1) // 2]
    _, spread = median_and_spread([r["steps_per_sec"] for r in results])
    result |= {"spread": spread, "num_envs": num_envs, "steps": steps}
    return {**result, "target": target, "passed": bool(result["steps_per_sec"] >= target)}


def _measure(envs, steps: int, warmup: int, num_envs: int, driver) -> dict:
    observations, _ = envs.reset(seed=1)
    latency_s = np.empty(steps)
    for i in range(-warmup, steps):
        actions = driver(observations)
        begun = time.perf_counter()
        observations, *_ = envs.step(actions)
        if i >= 0:
            latency_s[i] = time.perf_counter() - begun
    p50, p95, p99 = np.percentile(latency_s, [50, 95, 99]) * 1e3
    return {
        "steps_per_sec": float(num_envs * steps / latency_s.sum()),
        "mean_ms": float(latency_s.mean() * 1e3),
        "p50_ms": float(p50),
        "p95_ms": float(p95),
        "p99_ms": float(p99),
    }


def bench_embedded(args: Args, target: float) -> list[dict]:
    """RacerSim and RacerVectorEnv at every number of cars; then on three tracks at once, and with the cars in the walls."""
    rows = []
    cases = [(f"{n:,}", n, args.track_id, drive) for n in CAR_COUNTS]
    cases += [("1,024 on 3 tracks", 1_024, ALL_TRACKS, drive), ("1,024 in the walls", 1_024, args.track_id, lean)]
    for label, num_envs, track, driver in cases:
        common = {"steps": args.steps, "warmup": args.warmup, "repeats": args.repeats, "target": target}
        common |= {"num_envs": num_envs, "track_id": track, "driver": driver}
        row = run_benchmark(**common, engine_only=True)
        row |= {"label": label, "env_steps_per_sec": run_benchmark(**common)["steps_per_sec"]}
        rows.append(row)
        print_row(row)
    return rows


def bench_bridge(args: Args, target: float) -> list[dict]:
    """The real game with one connection, and with several."""
    rows = []
    for num_envs in sorted({1, args.num_envs}):
        common = {"steps": args.steps, "warmup": args.warmup, "repeats": args.repeats, "target": target}
        row = run_benchmark(**common, num_envs=num_envs, track_id=args.track_id, bridge_url=list(args.bridge_url))
        rows.append(row | {"label": f"{num_envs:,}"})
        print_row(rows[-1])
    return rows


# -- 2 learning alone ------------------------------------------------------------------------------------------------------


def bench_learning(args: Args) -> list[dict]:
    """Updates/s: optimiser steps of all networks, on samples that are there already."""
    rows = []
    for name in ALGORITHMS:
        learner = {"ppo": ppo_learner, "sac": sac_learner}[name]()
        rows.append(measure_learning(args, f"{name}_racer.py", *learner))
        if args.compare:
            use_all_cores()
            learner = {"ppo": sb3_ppo_learner, "sac": sb3_sac_learner}[name]()
            rows.append(measure_learning(args, f"Stable-Baselines3 {name.upper()}", *learner))
    return rows


def measure_learning(args: Args, label: str, learn, updates: int, samples: int) -> dict:
    """learn() makes so many updates on so many samples."""
    learn()
    rates = []
    for _ in range(args.repeats):
        count, begun = 0, time.perf_counter()
        while not count or time.perf_counter() - begun < LEARNING_S:
            learn()
            count += 1
        rates.append(count / (time.perf_counter() - begun))
    rate, spread = median_and_spread(rates)
    row = {"label": label, "updates_per_sec": rate * updates, "samples_per_sec": rate * samples, "spread": spread}
    print(f"{label:<24}{row['updates_per_sec']:>11,.0f} {spread:>7.1%} {row['samples_per_sec']:>14,.0f}", flush=True)
    return row


def ppo_learner():
    """PPO's update on a rollout, at the default settings."""
    import torch

    import ppo_racer as trainer

    args, generator = trainer.Args(), torch.Generator().manual_seed(0)
    torch.set_num_threads(1)
    agent, count = trainer.make_agent(args), args.steps_per_iteration
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, fused=True)
    shapes = {"normalized_obs": (14,), "actions": (3,), "advantages": (), "returns": ()}
    batch = {name: torch.randn(count, *shape, generator=generator) for name, shape in shapes.items()}
    batch["logprobs"] = torch.full((count,), -3.0)
    samples = args.update_epochs * count
    return (
        lambda: trainer.update(agent, optimizer, batch, args.ent_coef, args, generator),
        samples // args.minibatch_size,
        samples,
    )


def sac_learner():
    """SAC's update after a choice of all cars, at the default settings: the critics' steps are counted."""
    import torch

    import sac_racer as trainer

    args, generator = trainer.Args(), torch.Generator().manual_seed(0)
    torch.set_num_threads(1)
    agent, count = trainer.make_agent(args), args.updates * args.batch_size
    optimizers = trainer.make_optimizers(agent, args.learning_rate)
    shapes = {"obs": (14,), "next_obs": (14,), "actions": (3,), "rewards": (), "discounts": ()}
    samples = {name: torch.rand(count, *shape, generator=generator) for name, shape in shapes.items()}
    return lambda: trainer.update(agent, *optimizers, samples, args, generator), args.updates, count


# -- 3 training ------------------------------------------------------------------------------------------------------------

# A run as a process of its own, which writes what it reached, and how long it took to begin, to a file.
RUN = """
import time; begun = time.perf_counter()
import json, {name}_racer as trainer
before = time.perf_counter() - begun
result = trainer.train(trainer.Args(seed={seed}, run_dir=trainer.Path({folder!r}){more}))
json.dump({{**result, "before": before, "best": result["best"]["episodes"]}}, open({path!r}, "w"))
"""


def bench_training(args: Args) -> list[dict]:
    """Each algorithm's default command, from the start of its process to the end."""
    rows = []
    for name in ALGORITHMS:
        row = median_run(f"{name}_racer.py", [run_training(name, seed, args) for seed in range(1, args.runs + 1)])
        print_training(row)
        rows.append(row)
        if args.compare:
            use_all_cores()
            rows.append(sb3_training(name, args))
            print_training(rows[-1])
    return rows


def run_training(name: str, seed: int, args: Args) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        more = f", total_timesteps={args.total_timesteps}" if args.total_timesteps else ""
        script = RUN.format(name=name, seed=seed, folder=folder, path=str(path), more=more)
        begun = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", script], cwd=HERE, capture_output=True, text=True)
        seconds = time.perf_counter() - begun
        if done.returncode:
            raise RuntimeError(f"{name}_racer.py failed: {done.stderr.strip()[-500:]}")
        result = json.loads(path.read_text())
    beaten, best = result["published_beaten"], result["best"]
    return {
        "steps": result["steps"],
        "seconds": seconds,
        "steps_per_sec": result["steps"] / seconds,
        "loop_steps_per_sec": result["steps_per_sec"],
        "seconds_to_lap": result["before"] + beaten["seconds"] if beaten else None,
        "steps_to_lap": beaten["steps"] if beaten else None,
        "flying_lap_sec": best[0]["flying_lap_sec"] if best else None,
        "clock": result["clock"],
    }


def median_run(label: str, results: list[dict]) -> dict:
    """The run of median speed, with the medians and spreads of all that varies."""
    ordered = sorted(results, key=lambda result: result["steps_per_sec"])
    row = {**ordered[(len(ordered) - 1) // 2], "label": label, "runs": len(results)}
    row["spread"] = median_and_spread([result["steps_per_sec"] for result in results])[1]
    laps = [result["seconds_to_lap"] for result in results]
    row["all_seconds_to_lap"] = laps
    row["seconds_to_lap"] = None if None in laps else median_and_spread(laps)[0]
    return row


def print_training(row: dict) -> None:
    lap = "none" if row["seconds_to_lap"] is None else f"{row['seconds_to_lap']:.1f} s"
    best = "none" if row["flying_lap_sec"] is None else f"{row['flying_lap_sec']:.3f} s"
    numbers = f"{row['steps']:>10,} {row['seconds']:>8.1f} s {row['steps_per_sec']:>11,.0f} {row['spread']:>7.1%}"
    print(f"{row['label']:<24}{numbers} {row['loop_steps_per_sec']:>12,.0f} {lap:>11} {best:>10}", flush=True)
    if row.get("clock"):
        total = sum(row["clock"].values())
        shares = sorted(row["clock"].items(), key=lambda item: -item[1])
        text = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in shares)
        print(f"{'':<24}{text}; a step takes {1e6 * total / row['steps']:.2f} us", flush=True)


# -- Stable-Baselines3, for comparison -------------------------------------------------------------------------------------


def use_all_cores() -> None:
    """As torch does by itself; our own learners have set it to what they use."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)


def sb3_cars(num_envs: int):
    """The embedded engine as a vector environment of Stable-Baselines3: all cars in one call, as fast as it can be given."""
    from stable_baselines3.common.vec_env import VecEnv, VecNormalize

    class Cars(VecEnv):
        def __init__(self):
            self.envs = RacerVectorEnv(num_envs, stagger=num_envs > 1)
            super().__init__(num_envs, self.envs.single_observation_space, self.envs.single_action_space)

        def reset(self):
            return self.envs.reset(seed=1)[0]

        def step_async(self, actions):
            self.actions = actions

        def step_wait(self):
            observations, rewards, terminated, truncated, infos = self.envs.step(self.actions)
            each = [{} for _ in range(num_envs)]
            for i in np.flatnonzero(terminated | truncated):
                each[i] = {
                    "terminal_observation": infos["final_obs"][i],
                    "TimeLimit.truncated": bool(not terminated[i]),
                }
            return observations, rewards.astype(np.float32), terminated | truncated, each

        def close(self):
            self.envs.close()

        def get_attr(self, name, indices=None):
            return [None] * num_envs

        def set_attr(self, name, value, indices=None):
            pass

        def env_method(self, name, *arguments, indices=None, **named):
            return [None] * num_envs

        def env_is_wrapped(self, wrapper, indices=None):
            return [False] * num_envs

    return VecNormalize(Cars())


def sb3_ppo_learner():
    """Its PPO.train() with our cars, rollout, minibatches, epochs and layers."""
    from stable_baselines3 import PPO

    import ppo_racer

    args = ppo_racer.Args()
    model = PPO("MlpPolicy", sb3_cars(args.num_envs), n_steps=args.rollout_steps, batch_size=args.minibatch_size,
                n_epochs=args.update_epochs, policy_kwargs={"net_arch": [args.hidden, args.hidden]}, device="cpu")  # fmt: skip
    model.learn(args.steps_per_iteration)
    samples = args.update_epochs * args.steps_per_iteration
    return model.train, samples // args.minibatch_size, samples


def sb3_sac_learner():
    """Its SAC.train() with our batch and layers."""
    from stable_baselines3 import SAC

    import sac_racer

    args = sac_racer.Args()
    model = SAC("MlpPolicy", sb3_cars(args.num_envs), batch_size=args.batch_size, learning_starts=1_000,
                policy_kwargs={"net_arch": [args.hidden, args.hidden]}, device="cpu")  # fmt: skip
    model.learn(3_000)
    return (
        lambda: model.train(gradient_steps=args.updates, batch_size=args.batch_size),
        args.updates,
        args.updates * args.batch_size,
    )


def sb3_training(name: str, args: Args) -> dict:
    """Its own defaults, as people run it: PPO with 8 cars, SAC with one. Until a lap under the mark, or --compare-seconds."""
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback

    cars, judge = sb3_cars(8 if name == "ppo" else 1), RacerVectorEnv(1)
    model = getattr(stable_baselines3, name.upper())("MlpPolicy", cars, seed=1, device="cpu")
    every, mark = 20_000 if name == "ppo" else 5_000, PUBLISHED_LAP_TICKS["track-01"]
    reached: dict = {"lap": None, "judging": 0.0}

    def drive(obs):
        return model.predict(cars.normalize_obs(obs), deterministic=True)[0]

    class Until(BaseCallback):
        def _on_step(self) -> bool:
            seconds = time.perf_counter() - begun - reached["judging"]
            if self.num_timesteps % every < self.training_env.num_envs:
                judging = time.perf_counter()
                (episode,) = evaluate(drive, judge, ["track-01"])
                reached["judging"] += time.perf_counter() - judging
                if min(episode.flying_laps, default=mark) < mark:
                    reached["lap"], reached["best"] = seconds, min(episode.flying_laps) / 60
            return reached["lap"] is None and seconds < args.compare_seconds

    begun = time.perf_counter()
    model.learn(10**9, callback=Until())
    seconds = time.perf_counter() - begun - reached["judging"]  # its evaluations are ours, so they are not counted
    rate = model.num_timesteps / seconds
    row = {"label": f"Stable-Baselines3 {name.upper()}", "runs": 1, "spread": 0.0, "clock": {}}
    row |= {"steps": model.num_timesteps, "seconds": seconds, "steps_per_sec": rate, "loop_steps_per_sec": rate}
    steps_to_lap = model.num_timesteps if reached["lap"] else None
    return {
        **row,
        "seconds_to_lap": reached["lap"],
        "steps_to_lap": steps_to_lap,
        "flying_lap_sec": reached.get("best"),
    }


# -- reporting -------------------------------------------------------------------------------------------------------------


def median_and_spread(values) -> tuple[float, float]:
    """The median, and (largest - smallest) / median."""
    middle = statistics.median(values)
    return middle, (max(values) - min(values)) / middle


def machine() -> dict:
    """What these numbers were measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    name = model[1] if model else platform.processor() or platform.machine()
    versions = {"python": platform.python_version()}
    versions |= {package: importlib.metadata.version(package) for package in ("numpy", "gymnasium", "torch")}
    return {"cpu": name, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.release()}", **versions}


def print_machine(facts: dict) -> None:
    print(f"{facts['cpu']}, {facts['cores']} cores, {facts['system']}")
    print(f"Python {facts['python']}, NumPy {facts['numpy']}, Gymnasium {facts['gymnasium']}, PyTorch {facts['torch']}")


def print_environment_header(embedded: bool) -> None:
    print("\nenvironment: one process, one thread")
    columns = f"{'steps/s':>11} {'spread':>7} {'mean ms':>9} {'p50 ms':>9} {'p95 ms':>9} {'p99 ms':>9} {'x bridge':>9}"
    print(f"{'cars' if embedded else 'connections':<19}{columns}" + (f" {'as vector env':>14}" if embedded else ""))


def print_row(row: dict) -> None:
    times = " ".join(f"{row[key]:>9.3f}" for key in ("mean_ms", "p50_ms", "p95_ms", "p99_ms"))
    ratio = row["steps_per_sec"] / PUBLISHED_BRIDGE_STEPS_PER_SEC
    env = f" {row['env_steps_per_sec']:>14,.0f}" if "env_steps_per_sec" in row else ""
    print(
        f"{row['label']:<19}{row['steps_per_sec']:>11,.0f} {row['spread']:>7.1%} {times} {ratio:>8,.1f}x{env}",
        flush=True,
    )


def main(args: Args) -> int:
    target = args.target if args.target is not None else (BRIDGE_TARGET if args.bridge_url else EMBEDDED_TARGET)
    if args.json:  # rather now than after the measuring
        try:
            args.json.touch()
        except OSError as error:
            print(f"bench_racer: --json {args.json} cannot be written: {error.strerror}", file=sys.stderr)
            return 2
    found: dict = {"machine": machine(), "target": target, "passed": True}
    print_machine(found["machine"])
    try:
        if args.bridge_url or "environment" in args.only:
            print_environment_header(embedded=not args.bridge_url)
            found["rows"] = bench_bridge(args, target) if args.bridge_url else bench_embedded(args, target)
            best = max(row["steps_per_sec"] for row in found["rows"])
            found["passed"] = best >= target
            print(f"x bridge: against the bridge's published {PUBLISHED_BRIDGE_STEPS_PER_SEC:,} steps/s")
            print(
                f"fastest row {best:,.0f} steps/s, target {target:,.0f}: {'reached' if found['passed'] else 'MISSED'}"
            )
        if not args.bridge_url and "learning" in args.only:
            print(f"\nlearning{'':<16}{'updates/s':>11} {'spread':>7} {'samples/s':>14}")
            found["learning"] = bench_learning(args)
        if not args.bridge_url and "training" in args.only:
            columns = (
                f"{'steps':>10} {'seconds':>10} {'steps/s':>11} {'spread':>7} {'in the loop':>12} {'< ' + LAP_MARK:>11}"
            )
            print(f"\ntraining on track-01{'':<4}{columns} {'best lap':>10}")
            found["training"] = bench_training(args)
    except (BridgeError, RuntimeError) as error:
        print(f"bench_racer: {error}", file=sys.stderr)
        return 2
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except ValueError as error:  # an unknown track, say
        print(f"bench_racer: {error}", file=sys.stderr)
        sys.exit(2)
