"""How fast it is and how well it drives, measured on this machine.

    python bench_racer.py                                     # the first two tables
    python bench_racer.py --only environment                  # the first, 20 seconds
    python bench_racer.py --only training --runs 3            # medians of three seeds
    python bench_racer.py --only drivers                      # what the hand-written driver reaches
    python bench_racer.py --only drivers --checkpoint runs/NAME/best.pt      # and a trained one beside it
    python bench_racer.py --only results --seeds 101 110      # the README's results: every command with ten seeds, an hour
    python bench_racer.py --bridge-url ws://localhost:9876    # the real game, 1 and --num-envs connections
    python bench_racer.py --json out.json                     # every number, for a machine to read

Every row is the median of its repeats, beside their spread, (fastest - slowest) / median.

    environment  steps/s of the embedded engine with 1 to 4,096 cars; within a repeat, --steps calls of step() are timed
                 after --warmup that are not. What drives the cars is not timed
    training     each algorithm's default command as a process of its own, from its start to its end: steps/s, the seconds
                 to a lap faster than the published driver's 7.367 s on track-01, and where the time goes
    drivers      an episode from the grid on every track: laps, reward, time off the road
    results      what the README's commands reach with each of --seeds, as processes of their own: median and worst of the
                 best driver's flying lap and reward, time off the road, and the steps after which every evaluation is faster
                 than the published driver; for --random-tracks, the same on tracks that the driver has never seen

Exit code: 0 if the environment's fastest row reaches --target steps/s, 1 if not, 2 if something could not be measured
(no bridge, a bad flag).

    from bench_racer import run_benchmark
    run_benchmark(steps=500, target=100_000, warmup=50, num_envs=256)     # one row as a dict
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import math
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

from callbacks_lite import read_csv
from racer.game.bridge import BridgeError
from racer.game.config import load_config
from racer.game.rules import TICKS_PER_SECOND
from racer.game.tracks import TRACKS
from racer.training.checkpoints import load_driver
from racer.training.evaluation import describe, evaluate, score, summarize
from racer.training.references import GAINS, OFFSETS, best_hand_written, full_throttle
from racer_env import RacerVectorEnv

PUBLISHED_BRIDGE_STEPS_PER_SEC = 3_980  # what the game's authors report for their bridge on a desktop, one connection
PUBLISHED_LAP_SEC = 442 / TICKS_PER_SECOND  # their published driver's flying lap on track-01
CAR_COUNTS = (1, 16, 64, 256, 1_024, 4_096)
EMBEDDED_TARGET, BRIDGE_TARGET = 1_000_000.0, 1_000.0
ALGORITHMS = ("ppo", "sac")
USUAL_TABLES = ("environment", "training")
HERE = Path(__file__).resolve().parent


@dataclasses.dataclass
class Args:
    """Measure the environment and training; the real game behind a bridge; or drivers."""

    only: tuple[Literal["environment", "training", "drivers", "results", "peers"], ...] = USUAL_TABLES
    """the tables to measure; peers: our trainers beside those of Stable-Baselines3"""
    checkpoint: tuple[Path, ...] = ()
    """drivers: trained drivers to drive beside the hand-written one, checkpoints or run folders"""
    seeds: tuple[int, int] = (101, 110)
    """results: the first seed and the last one"""
    rows: tuple[int, ...] = ()
    """results: only these commands, by their number in RESULTS, from 0 (default: all)"""
    runs: int = 1
    """training, peers: runs of each algorithm, with seeds 1, 2, ...; the median one is reported"""
    total_timesteps: int | None = None
    """training: steps of a run (default: each algorithm's own)"""
    bridge_url: tuple[str, ...] = ()
    """measure the real game at these URLs instead of the embedded engine"""
    num_envs: int = 8
    """bridge: number of connections of the second row"""
    track_id: tuple[str, ...] = ()
    """tracks to drive on (default: track-01; all three of the game for drivers)"""
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
        if not set(self.rows) <= set(range(len(RESULTS))):
            raise ValueError(f"--rows is {self.rows}; the rows are 0 to {len(RESULTS) - 1}")
        if self.seeds[0] > self.seeds[1]:
            raise ValueError(f"--seeds is {self.seeds[0]} {self.seeds[1]}; give the first one and the last one")


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


def bench_drivers(args: Args) -> list[dict]:
    rows, config, tracks = [], load_config(), args.track_id or tuple(TRACKS)
    trained_drivers = [(str(path), load_driver(path)) for path in args.checkpoint]
    for track, (reward, gain, offset) in best_hand_written(tracks).items():
        best = functools.partial(full_throttle, gain=gain, offset=offset)
        hand_written = ("hand-written", full_throttle), (f"hand-written, best of {len(GAINS) * len(OFFSETS)}", best)
        for label, drive in (*hand_written, *trained_drivers):
            result = summarize(evaluate(drive, RacerVectorEnv(1, track), [track]), config, reward)
            rows.append({"label": label, **result})
            print(f"{label:<26}  {describe(result)}", flush=True)
    return rows


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
    results, rows = summary["results"], read_csv(folder / "run" / "metrics.csv")
    around = seconds - summary["seconds"]  # the start of the process, and its end
    evaluations = [  # step, flying lap or None, seconds since the start of the process
        (
            int(row["step"]),
            float(row.get("eval/flying_lap_time_sec") or 0) or None,
            around + int(row["step"]) / float(row["time/fps"]),
        )
        for row in rows
        if row["eval/mean_reward"]
    ]
    beaten = (end for _, lap, end in evaluations if lap and lap < PUBLISHED_LAP_SEC)
    return {
        "steps": summary["steps"],
        "seconds": seconds,
        "steps_per_sec": summary["steps"] / seconds,
        "loop_steps_per_sec": summary["steps_per_sec"],
        "seconds_to_lap": next(beaten, None),
        "flying_lap_sec": results[0]["flying_lap_sec"] if results else None,
        "clock": summary["clock"],
        "results": results,
        "evaluations": evaluations,
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


# -- results ---------------------------------------------------------------------------------------------------------------

RESULTS = (  # trainer, flags
    ("ppo", ""),
    ("sac", ""),
    ("ppo", "--slow-game --eval-every 2000"),
    ("sac", "--slow-game --eval-every 2000"),
    ("ppo", "--track-id track-01 track-02 track-03 --total-timesteps 8000000"),
    ("ppo", "--random-tracks 24"),
    ("sac", "--random-tracks 24"),
)
OURS_BESIDE_PEERS = (
    "ppo_racer.py --eval-every 25000 --total-timesteps 500000",
    "ppo_racer.py --slow-game --eval-every 2000",
    "sac_racer.py --slow-game --eval-every 2000",
)
UNSEEN = tuple(f"random-{number}" for number in range(10_001, 10_021))
STARTS_PER_TRACK = 20  # from anywhere, on every unseen track


def bench_results(args: Args) -> list[dict]:
    rows, seeds = bench_drivers(args), range(args.seeds[0], args.seeds[1] + 1)
    print(f"\nseeds {seeds[0]} to {seeds[-1]}: median / worst")
    default = evaluate(full_throttle, RacerVectorEnv(len(UNSEEN), UNSEEN), UNSEEN)
    best = best_hand_written(UNSEEN)
    references = {track: (score([episode]), best[track][0]) for track, episode in zip(UNSEEN, default, strict=True)}
    for name, flags in [RESULTS[row] for row in args.rows] if args.rows else RESULTS:
        print(f"{name}_racer.py {flags}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            folders = [Path(folder) / str(seed) for seed in seeds]
            runs = [run_command(name, [*flags.split(), "--seed", path.name], path) for path in folders]
            unseen = [drive_unseen(load_driver(path / "run"), references) for path in folders if "--random-tracks" in flags]
        rows.append({"label": f"{name}_racer.py {flags}".strip(), "seeds": [*seeds], "runs": runs, "unseen": unseen})
        for line in lines_of_unseen(unseen) + lines_of_tracks(unseen) if unseen else lines_of_tracks(runs):
            print(f"    {line}")
        seconds = [run["seconds"] for run in runs]
        print(f"    {statistics.median(seconds):.0f} s, {max(seconds):.0f} s at most", flush=True)
    return rows


def holds_from(evaluations: list[tuple[int, float | None, float]], target: float) -> tuple[float, float]:
    """The steps and the seconds of the first evaluation from which on every lap time is below the target; or infinite."""
    held = (math.inf, math.inf)
    for steps, lap, seconds in reversed(evaluations):
        if not lap or lap >= target:
            break
        held = steps, seconds
    return held


def lines_of_tracks(runs: list[dict]) -> list[str]:
    lines = []
    for results in zip(*(run["results"] for run in runs), strict=True):  # of one track, all seeds
        laps = [result["flying_lap_sec"] or math.inf for result in results]
        rewards, off_road = ([result[key] for result in results] for key in ("mean_reward", "off_road_share"))
        text = f"{results[0]['track']}: flying lap {statistics.median(laps):.3f} / {max(laps):.3f} s, reward "
        text += f"{statistics.median(rewards):.3f} / {min(rewards):.3f}, off the road {statistics.median(off_road):.1%}"
        lines.append(f"{text} / {max(off_road):.1%}")
    if len(lines) == 1:
        holds = [holds_from(run["evaluations"], PUBLISHED_LAP_SEC)[0] for run in runs]
        lines[0] += f", holds from {statistics.median(holds):,.0f} / {max(holds):,.0f} steps"
    return lines


def bench_peers(args: Args) -> list[dict]:
    from racer.peers import PEERS, show_peers, train_peer  # needs stable-baselines3

    def ours(label: str, seed: int) -> dict:
        script, *flags = label.split()
        with tempfile.TemporaryDirectory() as folder:
            return run_command(script.removesuffix("_racer.py"), [*flags, "--seed", str(seed)], Path(folder))

    runs: dict[str, list[dict]] = {label: [] for label in (*OURS_BESIDE_PEERS, *PEERS)}
    for seed in range(args.seeds[0], args.seeds[0] + args.runs):
        for label, found in runs.items():  # one after the other
            found.append(train_peer(label, seed) if label in PEERS else ours(label, seed))
    held = {label: [holds_from(run["evaluations"], PUBLISHED_LAP_SEC) for run in found] for label, found in runs.items()}
    show_peers(runs, held)
    return [{"label": label, "runs": found} for label, found in runs.items()]


def drive_unseen(driver, references: dict) -> dict:
    """A driver on tracks that it has never seen. Shares are of the rewards of the hand-written driver's best settings."""

    def episodes(tracks, cars: int = 1, **settings) -> list:
        return evaluate(driver, RacerVectorEnv(cars * len(tracks), tracks, **settings), tracks, seed=0)

    driven, anywhere = episodes([*references]), episodes([*references], STARTS_PER_TRACK, start="anywhere")
    rewards, (one, best) = np.array([sum(e.rewards) for e in driven]), np.array([*references.values()]).T
    return {
        "better_than_one": int((rewards > one).sum()),
        "better_than_best": int((rewards > best).sum()),
        "share": float((rewards / best).mean()),
        "least_share": float((rewards / best).min()),
        "off_road_share": float(np.mean([np.mean(e.off_road) for e in driven])),
        "episodes": len(anywhere),
        "failures": sum(e.failed for e in anywhere),
        "results": [summarize([e], load_config()) for e in episodes([*TRACKS])],
    }


def lines_of_unseen(unseen: list[dict]) -> list[str]:
    names = ("better_than_one", "better_than_best", "share", "least_share", "off_road_share", "failures")
    one, best, share, least, off_road, failures = ([found[name] for found in unseen] for name in names)
    of, median = f"of {len(UNSEEN)} unseen tracks", statistics.median
    return [
        f"reward above the hand-written driver's on {median(one):g} / {min(one)} {of}, above the best of its settings on "
        f"{median(best):g} / {min(best)}",
        f"reward {median(share):.1%} / {min(share):.1%} of that best in the mean, {median(least):.1%} / {min(least):.1%} on the "
        f"worst track; off the road {median(off_road):.1%} / {max(off_road):.1%}; failures in {unseen[0]['episodes']} episodes "
        f"from anywhere {median(failures):g} / {max(failures)}",
    ]


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
        if not args.bridge_url:
            tables = {
                "training": bench_training,
                "drivers": bench_drivers,
                "results": bench_results,
                "peers": bench_peers,
            }
            found |= {name: measure(args) for name, measure in tables.items() if name in args.only}
        if args.json:
            args.json.write_text(json.dumps(found, indent=2))
    except (BridgeError, RuntimeError, ValueError, OSError) as error:  # ValueError: an unknown track, say
        print(f"bench_racer: {error}", file=sys.stderr)
        return 2
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit ends a trainer that is running, too
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except ValueError as error:  # a bad flag
        print(f"bench_racer: {error}", file=sys.stderr)
        sys.exit(2)
