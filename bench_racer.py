"""How fast the environment is, measured on this machine.

    python bench_racer.py                                     # the embedded engine, 1 to 4,096 cars; about 20 seconds
    python bench_racer.py --track-id track-03 --json out.json
    python bench_racer.py --bridge-url ws://localhost:9876    # the real game, 1 and --num-envs connections

Every row is the median of --repeats; within a repeat, --steps calls of step() are timed after --warmup that are not. What
drives the cars is not timed. Exit code: 0 if the fastest row reaches --target steps/s, 1 if not, 2 if it could not
be measured (no bridge, a bad flag).

    from bench_racer import run_benchmark
    run_benchmark(steps=500, target=100_000, warmup=50, num_envs=256)     # one row as a dict
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import tyro

from racer_env import BridgeError, RacerVectorEnv
from racer_sim import RacerSim

PUBLISHED_BRIDGE_STEPS_PER_SEC = 3_980  # what the game's authors report for their bridge on a desktop, one connection
CAR_COUNTS = (1, 16, 64, 256, 1_024, 4_096)
EMBEDDED_TARGET, BRIDGE_TARGET = 1_000_000.0, 1_000.0
ALL_TRACKS = ("track-01", "track-02", "track-03")


@dataclasses.dataclass
class Args:
    """Measure the environment: the embedded engine, or the real game behind a bridge."""

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
        for name, least in (("num_envs", 1), ("steps", 1), ("warmup", 0), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be {least} or more")
        if self.target is not None and not self.target >= 0:
            raise ValueError(f"--target is {self.target}; it must be a number of steps/s, 0 or more")


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


# -- measuring -------------------------------------------------------------------------------------------------------------


class _BareEngine:
    """RacerSim with the two methods of an environment that are measured."""

    def __init__(self, num_envs: int, tracks, start: str):
        self.sim = RacerSim(num_envs, tracks, start=start)

    def reset(self, seed: int):
        return self.sim.observe(), {}

    def step(self, actions):
        return self.sim.step(actions)

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
    if steps < 1 or repeats < 1 or warmup < 0:
        raise ValueError(f"steps={steps}, repeats={repeats}, warmup={warmup}: at least 1, 1 and 0 are needed")
    tracks = [track_id] if isinstance(track_id, str) else list(track_id)
    start = "grid" if bridge_url else "anywhere"  # spread over the track, as in training
    envs = (
        _BareEngine(num_envs, tracks, start)
        if engine_only
        else RacerVectorEnv(num_envs, tracks, None, bridge_url, start)
    )
    try:
        results = sorted(
            (_measure(envs, steps, warmup, num_envs, driver) for _ in range(repeats)), key=lambda r: r["steps_per_sec"]
        )
    finally:
        envs.close()
    result = results[len(results) // 2]
    slowest, fastest = results[0]["steps_per_sec"], results[-1]["steps_per_sec"]
    result |= {"spread": (fastest - slowest) / result["steps_per_sec"], "num_envs": num_envs, "steps": steps}
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
    rows = []
    for num_envs in sorted({1, args.num_envs}):
        common = {"steps": args.steps, "warmup": args.warmup, "repeats": args.repeats, "target": target}
        row = run_benchmark(**common, num_envs=num_envs, track_id=args.track_id, bridge_url=list(args.bridge_url))
        rows.append(row | {"label": f"{num_envs:,}"})
        print_row(rows[-1])
    return rows


# -- reporting -------------------------------------------------------------------------------------------------------------


def machine() -> dict:
    """What these numbers were measured on."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0] if models else name
    versions = {"python": platform.python_version(), "numpy": np.__version__, "gymnasium": gymnasium.__version__}
    return {"cpu": name, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.release()}", **versions}


def print_header(embedded: bool) -> None:
    facts = machine()
    print(f"{facts['cpu']}, {facts['cores']} cores, {facts['system']}; one process, one thread")
    print(f"Python {facts['python']}, NumPy {facts['numpy']}, Gymnasium {facts['gymnasium']}\n")
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
    print_header(embedded=not args.bridge_url)
    try:
        rows = bench_bridge(args, target) if args.bridge_url else bench_embedded(args, target)
    except BridgeError as error:
        print(f"bench_racer: {error}", file=sys.stderr)
        return 2
    best = max(row["steps_per_sec"] for row in rows)
    passed = best >= target
    print(f"\nx bridge: against the bridge's published {PUBLISHED_BRIDGE_STEPS_PER_SEC:,} steps/s")
    print(f"fastest row {best:,.0f} steps/s, target {target:,.0f}: {'reached' if passed else 'MISSED'}")
    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine(), "target": target, "passed": passed, "rows": rows}, indent=2)
        )
    return 0 if passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except ValueError as error:  # an unknown track, say
        print(f"bench_racer: {error}", file=sys.stderr)
        sys.exit(2)
