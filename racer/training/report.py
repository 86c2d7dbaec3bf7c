"""The end of a run: what was reached, where it is, what to type next."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from pathlib import Path

from racer.training.evaluation import lines_of
from racer.training.processes import world_size
from racer.training.terminal import print_safely, warn


def report(run) -> dict:
    """Print the summary of a Run and write it as summary.json. -> the summary as a dict"""
    total, folder, clock = run.args.total_timesteps, run.folder, run.clock.seconds
    session, driven = run.seconds - run.seconds_before, run.steps - run.terminal.first_step
    rate = driven / max(session - clock.get("evaluation", 0.0), 1e-9)
    if not driven:
        print_safely(f"\nnothing to do: the run is at {run.steps:,} of {total:,} steps; --total-timesteps extends it")
    here = f", {session:.1f} s of them in this session" if run.seconds_before else ""
    how = "done" if run.finished else "stopped"
    print_safely(f"\n\n{how}: {run.steps:,} steps in {run.seconds:.1f} s{here}; {rate:,.0f} steps/s without evaluation")
    clock["other"] = max(session - sum(clock.values()), 0.0)
    shares = sorted(clock.items(), key=lambda item: -item[1])
    print_safely("time      " + ", ".join(f"{name} {s:.1f} s ({s / session:.0%})" for name, s in shares))
    print_results("start", run.start_results)
    print_results("best", run.best["results"], f"at step {run.best['step']:,}")
    print_files(folder, run.finished)
    if not run.saved:
        warn(f"\nThe end of this run could not be written. Free disk space. {how_to_resume(folder)}")
    summary = {
        "run_folder": str(folder),
        "steps": run.steps,
        "finished": run.finished,
        "signal": run.stopped,
        "saved": run.saved,
        "seconds": run.seconds,
        "steps_per_sec": rate,
        "clock": clock,
        "start_results": run.start_results,
        "best_step": run.best["step"],
        "results": run.best["results"],
    }
    with contextlib.suppress(OSError):  # a full disk has been reported
        (folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    return {**summary, "best": run.best}


def print_results(label: str, results: list[dict], *more: str) -> None:
    if results:
        print_safely(f"{label:<10}" + f"\n{'':10}".join([*lines_of(results), *more]))


def print_files(folder: Path, finished: bool) -> None:
    files = ("best.pt", "checkpoint.pt", "metrics.csv", "race.html", "racing_line*.png", "replay*.gif", "lap-*.csv")
    there = [path.name for name in files for path in sorted(folder.glob(name))]
    print_safely(f"files     {folder}: {', '.join(there)}")
    if not finished:
        print_safely(f"resume    {command()} --resume {shlex.quote(str(folder))}")
    if "best.pt" in there:
        print_safely(f"evaluate  python {shlex.quote(sys.argv[0])} --evaluate {shlex.quote(str(folder))}")
    print_safely(f"look      tensorboard --logdir {shlex.quote(str(folder.parent))}")


def how_to_resume(folder: Path) -> str:
    if not (folder / "checkpoint.pt").exists():
        return f"There is no checkpoint in {folder}"
    return f"Resume from the last checkpoint with: {command()} --resume {shlex.quote(str(folder))}"


def command() -> str:
    """How this program was started, for telling people how to continue."""
    program, here = shlex.quote(sys.argv[0]), os.environ.get("LOCAL_WORLD_SIZE")
    if world_size() == 1 or here is None:
        return f"python {program}"
    machines = world_size() // int(here)
    return f"torchrun {f'--nnodes={machines} ' if machines > 1 else ''}--nproc_per_node={here} {program}"
