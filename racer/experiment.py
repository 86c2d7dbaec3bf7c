"""Is my change better? Commands over seeds: frozen, in parallel, resumable, and judged.

    python -m racer.experiment "ppo_racer.py" "ppo_racer.py --learning-rate 3e-3" --seeds 1 8
    python -m racer.experiment "ppo_racer.py --total-timesteps 500000" --against HEAD~1 --seeds 1 16     # my edit and a commit
    python -m racer.experiment "my_ppo.py" "ppo_racer.py" --out experiments/wider                        # copies of a trainer
    python -m racer.experiment "ppo_racer.py" "sb3 ppo tuned" --seeds 101 110                            # Stable-Baselines3
    python -m racer.experiment --out experiments/wider                                                   # continue, or show again

The code is copied at the start, so that it can be edited meanwhile. Finished runs are kept, interrupted ones resume; after
Ctrl+C or kill -9 the same command continues, and larger --seeds add runs. Every command is compared with the first one. Seconds are
those of runs that were alone on the machine (--jobs 1); without such runs they say so. In the folder: experiment.html,
race.html (the median drivers), curves.png, results.csv, experiment.json, and all runs.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import tyro

from callbacks_lite import MANY_TRACKS, read_csv
from racer.game.checks import UserError
from racer.game.rules import TICKS_PER_SECOND
from racer.statistics import verdict
from racer.training.checkpoints import lock_folder
from racer.training.settings import as_command, run_as_script
from racer.training.terminal import print_safely
from racer.view.page import race_page
from racer.view.telemetry import LapTrace, Race, load_laps

ROOT = Path(__file__).resolve().parents[1]
CODE = (
    "racer",
    "racer_env.py",
    "callbacks_lite.py",
    "ppo_racer.py",
    "sac_racer.py",
    "ai-config.json",
    "ai-config-fastest.json",
)
PUBLISHED_LAP_SEC = 442 / TICKS_PER_SECOND  # a flying lap on track-01 of the driver that the game's authors published
TEMPLATE = Path(__file__).parent / "view" / "experiment.html"
COLUMNS = ("command", "track", "seeds", "flying lap (s)", "% of limit", "reward", "off road (%)", "holds from", "seconds")


@dataclasses.dataclass
class Args:
    commands: tyro.conf.Positional[tuple[str, ...]] = ()
    """trainers with their flags, each in quotes; "sb3 NAME" is a peer of racer.sb3; none: those of --out"""
    seeds: tuple[int, int] = (1, 8)
    """the first seed and the last one"""
    against: str = ""
    """also run every command with the code of this git commit, and compare with that"""
    out: Path | None = None
    """folder of the experiment (default: experiments/, named after the commands)"""
    jobs: int = os.cpu_count() or 1
    """runs at a time; a trainer uses one core"""
    markdown: bool = False
    """print the table as Markdown"""


# == Frozen ============================================================================================================


def plan(args: Args) -> tuple[Path, dict]:
    """The folder and what is run there. A new experiment copies the code; one that is there has to be the same."""
    first, last = args.seeds
    if first > last or first < 0 or args.jobs < 1:
        raise UserError(
            f"--seeds is {first} {last} and --jobs {args.jobs}; give the first seed and the last one, and 1 job or more"
        )
    name = re.sub(r"[^\w.]+", "-", " ".join(args.commands))[:40].strip("-")
    name += "-" + hashlib.sha256(repr((args.commands, args.against)).encode()).hexdigest()[:6]
    folder = args.out or Path("experiments") / name
    file = folder / "experiment.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    if not args.commands:
        if found is None:
            raise UserError(f'{folder} is not an experiment; give commands, e.g. "ppo_racer.py" "ppo_racer.py --gamma 0.97"')
        return folder, found
    entries = [entry for text in args.commands for entry in entries_of(text, args.against)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in code_files(entries))).hexdigest()
    planned = {"commands": entries, "code": digest}
    if found is None:
        if folder.exists() and {path.name for path in folder.iterdir()} - {"code"}:
            raise UserError(f"{folder} has other files; give another --out")
        shutil.rmtree(folder / "code", ignore_errors=True)  # of a start that was killed
        freeze(folder, entries)
    elif (before := [without_runs(entry) for entry in found["commands"]]) != entries or found["code"] != digest:
        changed = "the code has changed since" if before == entries else "it has other commands"
        raise UserError(
            f"{folder} is another experiment: {changed}. Give another --out, or --out {folder} alone to continue it"
        )
    seeds = sorted({*(found or {"seeds": []})["seeds"], *range(first, last + 1)})
    return folder, {**planned, "seeds": seeds}


def without_runs(entry: dict) -> dict:
    return {key: value for key, value in entry.items() if key != "runs"}


def entries_of(text: str, against: str) -> list[dict]:
    """A command of the command line, and the same with the code of another commit before it."""
    words = shlex.split(text)
    if not words:
        raise UserError('an empty command; give a trainer with its flags, like "ppo_racer.py --gamma 0.97"')
    script = "sb3"
    if words[0] != "sb3":
        paths = [path for path in (Path(words[0]), ROOT / words[0]) if path.is_file() and path.suffix == ".py"]
        if not paths or "Args" not in paths[0].read_text(encoding="utf-8"):
            raise UserError(f"{words[0]!r} is not a trainer; give ppo_racer.py, sac_racer.py, a copy of one, or sb3")
        script = str(paths[0].resolve())
    own = {"command": text, "script": script, "words": words[1:], "code": "now"}
    return [{**own, "command": f"{text} @ {against}", "code": against}, own] if against else [own]


def code_files(entries: list[dict]) -> list[Path]:
    """Everything that is copied, in a fixed order."""
    ours = [path for name in CODE for path in ([ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*")))]
    scripts = [Path(entry["script"]) for entry in entries if entry["script"] != "sb3"]
    return [path for path in (*ours, *scripts) if path.is_file() and "__pycache__" not in path.parts]


def freeze(folder: Path, entries: list[dict]) -> None:
    """Copy the code, and that of another commit."""
    for code in dict.fromkeys(entry["code"] for entry in entries):
        there = folder / "code" / code.replace("/", "_")
        there.mkdir(parents=True)
        if code == "now":
            for name in (name for name in CODE if (ROOT / name).exists()):
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, there / name, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / name, there / name)
            for entry in entries:
                if entry["script"] != "sb3" and entry["code"] == code:
                    shutil.copy(entry["script"], there)
            continue
        try:
            git = ["git", "-C", str(ROOT), "archive", code]
            done = subprocess.run(git, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            shutil.rmtree(folder)
            said = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
            raise UserError(f"--against is {code!r}: {said}") from error
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(there, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        if missing := [e["script"] for e in entries if e["script"] != "sb3" and not (there / Path(e["script"]).name).exists()]:
            shutil.rmtree(folder)
            raise UserError(f"--against {code} has no {Path(missing[0]).name}")


# == Run ===============================================================================================================


@dataclasses.dataclass
class Job:
    """One run of a command with a seed."""

    number: int
    entry: dict
    seed: int
    parent: Path  # runs/NUMBER
    code: Path

    @property
    def folder(self) -> Path:
        return self.parent / str(self.seed)

    @property
    def log(self) -> Path:
        return self.parent / f"{self.seed}.log"

    @property
    def shared(self) -> Path:
        """This file exists if other runs were in progress at the same time."""
        return self.parent / f"{self.seed}.shared"

    @property
    def summary(self) -> dict | None:
        """Of a finished run."""
        try:
            found = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if found["finished"] and found["saved"] else None

    def locked(self) -> bool:
        """Whether a process still trains there: one that outlived a killed experiment."""
        if self.folder.exists():
            try:
                lock_folder(self.folder).close()
            except UserError:
                return True
        return False

    def start(self) -> subprocess.Popen:
        words = [*self.entry["words"], "--seed", str(self.seed), "--run-dir", str(self.parent), "--run-name", str(self.seed)]
        if self.entry["script"] == "sb3":
            path = f"import sys, runpy; sys.path.insert(0, {str(self.code)!r})"
            begin = f"{path}; runpy.run_module('racer.sb3', run_name='__main__', alter_sys=True)"
            flags = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))  # "ppo tuned" is one name
            command, words = ["-c", begin], [" ".join(words[:flags]), *words[flags:]]
        else:
            command = [str(self.code / Path(self.entry["script"]).name)]
            if (self.folder / "checkpoint.pt").exists():
                words = ["--resume", str(self.folder)]
            elif self.folder.exists():
                shutil.rmtree(self.folder)
        self.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            streams = {"stdout": log, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            # In a session of its own: Ctrl+C comes from here, once.
            return subprocess.Popen([sys.executable, *command, *words], **streams, start_new_session=os.name != "nt")


def jobs_of(folder: Path, planned: dict) -> list[Job]:
    codes = {entry["code"]: (folder / "code" / entry["code"].replace("/", "_")).resolve() for entry in planned["commands"]}
    return [
        Job(number, entry, seed, (folder / "runs" / str(number)).resolve(), codes[entry["code"]])
        for seed in planned["seeds"]
        for number, entry in enumerate(planned["commands"])
    ]


def run_jobs(jobs: list[Job], at_a_time: int) -> None:
    """Run what is not finished. A run that fails ends no other; Ctrl+C lets all save."""
    waiting, running, failed = [job for job in jobs if job.summary is None], {}, []
    seconds, live = [], sys.stdout.isatty()
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time and (free := next((job for job in waiting if not job.locked()), None)):
                waiting.remove(free)
                if free.summary is None:
                    running[free.start()] = free, time.monotonic()
                for job, _ in running.values() if len(running) > 1 else ():
                    job.shared.touch()
            ended = [process for process in running if process.poll() is not None]
            for job, began in map(running.pop, ended):
                if job.summary is not None:
                    seconds.append(time.monotonic() - began)
                    continue
                failed.append(job)
                lines = job.log.read_text(errors="replace").strip().splitlines()
                boxed = next((n for n, line in enumerate(lines) if line.startswith("╭")), None)  # a flag that tyro refuses
                lines = lines[-6:] if boxed is None else lines[boxed : boxed + 4]
                print_safely(f"\nFAILED: {job.entry['command']} --seed {job.seed}\n    " + "\n    ".join(lines))
            text = f"{len(jobs) - len(waiting) - len(running) - len(failed)} of {len(jobs)} runs"
            if seconds:
                text += f", {np.mean(seconds) * (len(waiting) + len(running) / 2) / at_a_time / 60:.1f} min left"
            now = ", ".join(f"{job.entry['command']} --seed {job.seed}" for job, _ in running.values())
            text += f"; now {now}" if now else ""
            if live or ended:
                print_safely(f"\r{text[:98]:<98}" if live else text[:98], end="" if live and (waiting or running) else "\n")
            time.sleep(0.1)
    except KeyboardInterrupt:
        for process in running if os.name != "nt" else ():  # there, Ctrl+C reaches all by itself
            process.send_signal(signal.SIGINT)
        for process in running:
            process.wait()
        raise


# == Judge =============================================================================================================


def collect(planned: dict, jobs: list[Job]) -> dict:
    """The results of all finished runs, as experiment.json holds them."""
    commands = [{**without_runs(entry), "runs": []} for entry in planned["commands"]]
    for job in jobs:
        if (summary := job.summary) is not None:
            kept = {key: summary[key] for key in ("steps", "seconds", "results")} | {"alone": not job.shared.exists()}
            commands[job.number]["runs"].append({"seed": job.seed, **kept, **curves_of(job.folder / "metrics.csv")})
    return {**planned, "commands": commands}


def curves_of(metrics: Path) -> dict:
    """Evaluations as [step, seconds, reward, flying lap], and some of the rewards of the cars that train."""
    rows = [row for row in read_csv(metrics) if float(row.get("time/fps") or 0) > 0]
    clock = {row["step"]: float(row["step"]) / float(row["time/fps"]) for row in rows}

    def number(row: dict, tag: str) -> float | None:
        return float(row.get(tag) or 0) or None

    evaluated = [row for row in rows if row.get("eval/mean_reward")]
    training = [row for row in rows if row.get("rollout/ep_rew_mean")]
    tags = ("eval/mean_reward", "eval/flying_lap_time_sec")
    return {
        "evaluations": [[int(r["step"]), round(clock[r["step"]], 2), *(number(r, tag) for tag in tags)] for r in evaluated],
        "training": [
            [int(r["step"]), round(clock[r["step"]], 2), round(float(r["rollout/ep_rew_mean"]), 4)]
            for r in training[:: max(1, len(training) // 80)]
        ],
    }


def holds_from(evaluations, lap_sec: float = PUBLISHED_LAP_SEC) -> float:
    """The step from which on every evaluation's flying lap is below; infinite if the last one is not."""
    held = math.inf
    for step, _, _, lap in reversed(evaluations):
        if not lap or lap >= lap_sec:
            break
        held = step
    return held


def rewards_of(command: dict) -> list[float]:
    """Of every run: the mean reward over its tracks."""
    return [float(np.mean([result["mean_reward"] for result in run["results"]])) for run in command["runs"]]


def table(found: dict) -> list[list[str]]:
    """A row per command and track: median / worst of the seeds."""

    def pair(values, worst, digits: int = 3) -> str:
        known = [value for value in values if value is not None and math.isfinite(value)]
        middle = float(np.median([math.inf if value is None else value for value in values])) if worst is max else None
        middle = middle if worst is max else (float(np.median(known)) if known else math.inf)
        least = worst(known) if len(known) == len(values) else math.inf
        if not math.isfinite(middle):
            return "never"
        return " / ".join("never" if not math.isfinite(v) else f"{v:,.{digits}f}" for v in (middle, least))

    rows = []
    for command in (command for command in found["commands"] if command["runs"]):
        runs, by_run = command["runs"], [few_results(run["results"]) for run in command["runs"]]
        for place, track in enumerate(result["track"] for result in by_run[0]):
            results, one = [results[place] for results in by_run], len(by_run[0]) == 1
            held = pair([holds_from(run["evaluations"]) for run in runs], max, 0) if one and track == "track-01" else ""
            percents = pair([result.get("percent_of_limit") for result in results], min, 1)
            cutting = sum(bool(result.get("cutting")) for result in results)
            rows.append([
                command["command"] if place == 0 else "", track, str(len(runs)),
                "" if len(runs[0]["results"]) > MANY_TRACKS else pair([result["flying_lap_sec"] for result in results], max),
                percents + (f", {cutting} cutting" if cutting else ""),
                pair([result["mean_reward"] for result in results], min),
                pair([100 * result["off_road_share"] for result in results], max, 1), held,
                seconds_of(runs) if place == 0 else "",
            ])  # fmt: skip
    return rows


def seconds_of(runs: list[dict]) -> str:
    """The median of the runs that had the machine to themselves, or of all if there are none."""
    alone = [run["seconds"] for run in runs if run.get("alone")]
    return f"{np.median(alone or [run['seconds'] for run in runs]):.0f}" + ("" if alone else ", shared")


def few_results(results: list[dict]) -> list[dict]:
    """Results by track; of many tracks, one for all of them."""
    if len(results) <= MANY_TRACKS:
        return results
    percents = [r["percent_of_limit"] for r in results if r.get("percent_of_limit") and not r.get("cutting")]
    means = {key: float(np.mean([r[key] for r in results])) for key in ("mean_reward", "off_road_share")}
    middle = float(np.median(percents)) if percents else None
    return [{"track": f"{len(results)} tracks", "flying_lap_sec": None, "percent_of_limit": middle, **means}]


def show_table(rows: list[list[str]], markdown: bool) -> str:
    rows = [list(COLUMNS), *rows]
    if markdown:
        rows.insert(1, ["---"] * len(COLUMNS))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)
    widths = [max(len(row[i]) for row in rows) for i in range(1, len(COLUMNS))]
    lines = []
    for row in rows:  # a long command has a line of its own
        lines += [row[0]] if row[0] else []
        lines.append("    " + "  ".join(f"{cell:>{wide}}" for cell, wide in zip(row[1:], widths, strict=True)))
    return "\n".join(lines)


def verdicts(found: dict) -> list[str]:
    """Every command against the first, in words."""
    first, *others = [command for command in found["commands"] if command["runs"]] or [None]
    lines = [f"{command['command']}: no finished runs, not compared" for command in found["commands"] if not command["runs"]]
    for other in others:
        tracks = [[result["track"] for result in command["runs"][0]["results"]] for command in (first, other)]
        said = verdict(rewards_of(first), rewards_of(other)) if tracks[0] == tracks[1] else "on other tracks, not compared"
        lines.append(f"{other['command']}: {said}")
    return lines


# == Show ==============================================================================================================


def write_whole(path: Path, text: str) -> None:
    """Completely or not at all."""
    path.with_suffix(".tmp").write_text(text, encoding="utf-8")
    os.replace(path.with_suffix(".tmp"), path)


def write_results(folder: Path, found: dict, jobs: list[Job]) -> None:
    """Everything to look at."""
    from racer.view.curves import draw_curves  # needs Pillow

    write_whole(folder / "experiment.json", json.dumps(found))
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        keys = ("track", "flying_lap_sec", "percent_of_limit", "mean_reward", "off_road_share")
        writer.writerow(("command", "seed", "steps", "seconds", *keys))
        for command in found["commands"]:
            for run in command["runs"]:
                for result in run["results"]:
                    about = command["command"], run["seed"], run["steps"], round(run["seconds"], 2)
                    writer.writerow((*about, *(result.get(key) for key in keys)))
    data = {"title": folder.name, "table": [COLUMNS, *table(found)], "verdicts": verdicts(found), "commands": found["commands"]}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    (folder / "experiment.html").write_text(
        TEMPLATE.read_text(encoding="utf-8").replace("/* DATA */ null", text), encoding="utf-8"
    )
    draw_curves(found["commands"]).save(folder / "curves.png")
    if races := median_races(found, jobs):
        (folder / "race.html").write_text(race_page("median drivers", races), encoding="utf-8")


def median_races(found: dict, jobs: list[Job]) -> list[Race]:
    """On every track, the lap of each command's run of median reward."""
    laps: dict[str, list[LapTrace]] = {}
    for number, command in enumerate(found["commands"]):
        order = np.argsort(rewards_of(command))
        if len(order):
            seed = command["runs"][order[(len(order) - 1) // 2]]["seed"]
            folder = next(job.folder for job in jobs if job.number == number and job.seed == seed)
            for file in sorted(folder.glob("lap-*.csv")):
                for lap in load_laps(file)[:1]:
                    lap.name, lap.note = command["command"], f"seed {seed}"
                    laps.setdefault(lap.track_id, []).append(lap)
    return [Race(each) for each in laps.values()]


def run_experiment(args: Args) -> dict:
    folder, found = plan(args)
    if (folder / "code").exists():  # else only its results were kept
        try:
            write_whole(folder / "experiment.json", json.dumps(found))
            jobs = jobs_of(folder, found)
            print_safely(f"{folder}: {len(jobs)} runs, {args.jobs} at a time")
            run_jobs(jobs, args.jobs)
            found = collect(found, jobs)
            write_results(folder, found, jobs)
        except OSError as error:
            raise UserError(f"cannot write {folder}: {error.strerror or error}. The same command continues") from error
        there = ", ".join(str(folder / name) for name in ("experiment.html", "race.html") if (folder / name).exists())
        print_safely(f"\nlook      {there} (in a browser)")
    print_safely(f"\nmedian / worst of the seeds\n{show_table(table(found), args.markdown)}\n")
    for text in verdicts(found):
        print_safely(text)
    missing = sum(len(found["seeds"]) - len(command["runs"]) for command in found["commands"])
    if missing and (folder / "code").exists():
        raise UserError(f"{missing} runs failed; their output is in {folder / 'runs'}. The same command runs them again")
    return found


@as_command
def main():
    run_experiment(tyro.cli(Args, prog="python -m racer.experiment", description=__doc__))


if __name__ == "__main__":
    run_as_script(main)
