"""How fast it is, measured on this machine. (How well it learns: python -m racer.experiment.)

    python bench_racer.py                                     # both tables
    python bench_racer.py --only environment                  # the first, 20 seconds
    python bench_racer.py --only training --runs 3            # medians of three seeds
    python bench_racer.py --bridge-url ws://localhost:9876    # the real game, 1 and --num-envs connections
    python bench_racer.py --json out.json                     # every number, for a machine to read

Every row is the median of its repeats, beside their spread, (fastest - slowest) / median.

    environment  steps/s of the embedded engine with 1 to 4,096 cars; within a repeat, --steps calls of step() are timed
                 after --warmup that are not. What drives the cars is not timed
    training     each algorithm's default command as a process of its own, from its start to its end: steps/s, the seconds
                 to a lap faster than the published driver's 7.367 s on track-01, and where the time goes

Exit code: 0 if the environment's fastest row reaches --target steps/s, 1 if not, 2 if something could not be measured
(no bridge, a bad flag).

    from bench_racer import run_benchmark
    run_benchmark(steps=500, target=100_000, warmup=50, num_envs=256)     # one row as a dict
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from racer.experiment import PUBLISHED_LAP_SEC, curves_of
from racer.game.bridge import BridgeError
from racer.game.checks import UserError
from racer.game.tracks import TRACKS
from racer_env import RacerVectorEnv

PUBLISHED_BRIDGE_STEPS_PER_SEC = 3_980  # what the game's authors report for their bridge on a desktop, one connection
CAR_COUNTS = (1, 16, 64, 256, 1_024, 4_096)
EMBEDDED_TARGET, BRIDGE_TARGET = 1_000_000.0, 1_000.0
ALGORITHMS = ("ppo", "sac")
HERE = Path(__file__).resolve().parent


@dataclasses.dataclass
class Args:
    """Measure the environment and training; the real game behind a bridge; or drivers."""

    only: tuple[Literal["environment", "training"], ...] = ("environment", "training")
    """the tables to measure"""
    runs: int = 1
    """training: runs of each algorithm, with seeds 1, 2, ...; the median one is reported"""
    total_timesteps: int | None = None
    """training: steps of a run (default: each algorithm's own)"""
    bridge_url: tuple[str, ...] = ()
    """measure the real game at these URLs instead of the embedded engine"""
    num_envs: int = 8
    """bridge: number of connections of the second row"""
    track_id: tuple[str, ...] = ()
    """tracks to drive on (default: track-01)"""
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
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be {least} or more")


# -- what drives ----------------------------------------------------------------------------------------------------------


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
    envs = RacerVectorEnv(num_envs, tracks, None, bridge_url, start)
    step = envs._sim.step if engine_only else envs.step
    try:
        results = [_measure(envs, step, steps, warmup, num_envs, driver) for _ in range(repeats)]
    finally:
        envs.close()
    row = median_row(results, "steps_per_sec") | {"num_envs": num_envs, "steps": steps, "target": target}
    return {**row, "passed": bool(row["steps_per_sec"] >= target)}


def _measure(envs, step, steps: int, warmup: int, num_envs: int, driver) -> dict:
    observations, _ = envs.reset(seed=1)
    latency_s = np.empty(steps)
    for i in range(-warmup, steps):
        actions = driver(observations)
        begun = time.perf_counter()
        observations, *_ = step(actions)
        if i >= 0:
            latency_s[i] = time.perf_counter() - begun
    times = {f"p{p}_ms": float(np.percentile(latency_s, p) * 1e3) for p in (50, 95, 99)}
    return {"steps_per_sec": float(num_envs / latency_s.mean()), "mean_ms": float(latency_s.mean() * 1e3), **times}


def bench_environment(args: Args, target: float) -> list[dict]:
    """The engine and RacerVectorEnv at every number of cars, on three tracks, in the walls; or the real game."""
    track = args.track_id or ("track-01",)
    cases = [(f"{n:,}", n, track, drive) for n in CAR_COUNTS]
    cases += [("1,024 on 3 tracks", 1_024, tuple(TRACKS), drive), ("1,024 in the walls", 1_024, track, lean)]
    if args.bridge_url:
        cases = [(f"{n:,}", n, track, drive) for n in sorted({1, args.num_envs})]
    columns = "".join(f"{name:>10}" for name in ("spread", "mean ms", "p50 ms", "p95 ms", "p99 ms", "x bridge"))
    print("\nenvironment: one process, one thread")
    print(f"{'connections' if args.bridge_url else 'cars':<19}{'steps/s':>11}{columns}{'as vector env':>15}")
    rows = []
    for label, num_envs, tracks, driver in cases:
        common = {"steps": args.steps, "warmup": args.warmup, "repeats": args.repeats, "target": target}
        common |= {"num_envs": num_envs, "track_id": tracks, "driver": driver}
        if args.bridge_url:
            row = run_benchmark(**common, bridge_url=list(args.bridge_url))
        else:
            row = run_benchmark(**common, engine_only=True)
            row["env_steps_per_sec"] = run_benchmark(**common)["steps_per_sec"]
        rows.append({"label": label, **row})
        times = "".join(f"{row[key]:>10.3f}" for key in ("mean_ms", "p50_ms", "p95_ms", "p99_ms"))
        ratio = row["steps_per_sec"] / PUBLISHED_BRIDGE_STEPS_PER_SEC
        as_envs = row.get("env_steps_per_sec", row["steps_per_sec"])
        print(f"{label:<19}{row['steps_per_sec']:>11,.0f}{row['spread']:>10.1%}{times}{ratio:>9,.1f}x{as_envs:>15,.0f}")
    return rows


# -- 2 training ------------------------------------------------------------------------------------------------------------


def bench_training(args: Args) -> list[dict]:
    """Each algorithm's default command, from the start of its process to the end."""
    rows = []
    target_lap = f"< {PUBLISHED_LAP_SEC:.3f} s"
    columns = f"{'steps':>10} {'seconds':>10} {'steps/s':>11} {'spread':>7} {'in the loop':>12} {target_lap:>11}"
    print(f"\n{'training on track-01':<24}{columns} {'best lap':>10}")
    more = ["--total-timesteps", str(args.total_timesteps)] if args.total_timesteps else []
    for name in ALGORITHMS:
        with tempfile.TemporaryDirectory() as folder:
            folders = [Path(folder) / str(seed) for seed in range(1, args.runs + 1)]
            results = [run_command(name, ["--seed", path.name, *more], path) for path in folders]
        rows.append({"label": f"{name}_racer.py", "runs": len(results), **median_row(results, "steps_per_sec")})
        laps = [result["seconds_to_lap"] for result in results]
        rows[-1]["seconds_to_lap"] = None if None in laps else statistics.median(laps)
        print_training(rows[-1])
    return rows


def run_command(name: str, words: list[str], folder: Path) -> dict:
    """A trainer's command as a process of its own, its run in that folder."""
    command = [sys.executable, str(HERE / f"{name}_racer.py"), "--run-dir", str(folder), "--run-name", "run", *words]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - begun
    if done.returncode:
        raise RuntimeError(f"{name}_racer.py failed: {done.stderr.strip()[-500:]}")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    results, around = summary["results"], seconds - summary["seconds"]  # around it: the start of the process, and its end
    evaluations = curves_of(folder / "run" / "metrics.csv")["evaluations"]
    return {
        "steps": summary["steps"],
        "seconds": seconds,
        "steps_per_sec": summary["steps"] / seconds,
        "loop_steps_per_sec": summary["steps_per_sec"],
        "seconds_to_lap": next((at + around for _, at, _, lap in evaluations if lap and lap < PUBLISHED_LAP_SEC), None),
        "flying_lap_sec": results[0]["flying_lap_sec"] if results else None,
        "clock": summary["clock"],
    }


def print_training(row: dict) -> None:
    lap = "none" if row["seconds_to_lap"] is None else f"{row['seconds_to_lap']:.1f} s"
    best = "none" if row["flying_lap_sec"] is None else f"{row['flying_lap_sec']:.3f} s"
    numbers = f"{row['steps']:>10,} {row['seconds']:>8.1f} s {row['steps_per_sec']:>11,.0f} {row['spread']:>7.1%}"
    print(f"{row['label']:<24}{numbers} {row['loop_steps_per_sec']:>12,.0f} {lap:>11} {best:>10}", flush=True)
    total = sum(row["clock"].values())
    shares = sorted(row["clock"].items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in shares)
    print(f"{'':<24}{text}; a step takes {1e6 * total / row['steps']:.2f} us", flush=True)


# -- reporting -------------------------------------------------------------------------------------------------------------


def median_row(rows: list[dict], key: str) -> dict:
    """The row of the median repeat, and the spread of all: (largest - smallest) / median."""
    ordered = sorted(rows, key=lambda row: row[key])
    middle = ordered[(len(rows) - 1) // 2]
    return {**middle, "spread": (ordered[-1][key] - ordered[0][key]) / middle[key]}


def machine() -> dict:
    """What these numbers were measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    name = model[1] if model else platform.processor() or platform.machine()
    versions = {"python": platform.python_version()}
    versions |= {package: importlib.metadata.version(package) for package in ("numpy", "gymnasium", "torch")}
    return {"cpu": name, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.release()}", **versions}


def main(args: Args) -> int:
    target = args.target if args.target is not None else (BRIDGE_TARGET if args.bridge_url else EMBEDDED_TARGET)
    found: dict = {"machine": machine(), "target": target, "passed": True}
    try:
        if args.json:
            args.json.touch()  # fail before measuring
        print(", ".join(f"{name} {value}" for name, value in found["machine"].items()))
        if args.bridge_url or "environment" in args.only:
            found["rows"] = bench_environment(args, target)
            best = max(row["steps_per_sec"] for row in found["rows"])
            found["passed"] = best >= target
            print(f"x bridge: against the bridge's published {PUBLISHED_BRIDGE_STEPS_PER_SEC:,} steps/s")
            print(f"fastest row {best:,.0f}, target {target:,.0f}: {'reached' if found['passed'] else 'MISSED'}")
        if not args.bridge_url and "training" in args.only:
            found["training"] = bench_training(args)
        if args.json:
            args.json.write_text(json.dumps(found, indent=2))
    except (BridgeError, RuntimeError, UserError, OSError) as error:
        print(f"bench_racer: {error}", file=sys.stderr)
        return 2
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit ends a trainer that is running, too
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except UserError as error:  # a bad flag
        print(f"bench_racer: {error}", file=sys.stderr)
        sys.exit(2)
