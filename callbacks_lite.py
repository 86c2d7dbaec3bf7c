"""Everything around the algorithm: metrics, checkpoints, the run folder, several processes, the command line.

    logger = MetricsLogger("runs/mine")
    logger.record("train/loss", 0.3)             # the last value counts
    logger.dump(step=16_384)                     # -> TensorBoard and runs/mine/metrics.csv

    1  MetricsLogger    scalars, texts and pictures to TensorBoard; scalars to metrics.csv
    2  the terminal     where the time goes, how far a run is
    3  processes        one run in several processes: gather values, average gradients, share the cars
    4  files            a checkpoint, a run folder
    5  Run              one training run: restores, counts, evaluates, logs, saves, stops on signals, reports
    6  command line     flags and presets, --help, --evaluate, --export, exit codes

Laps and episodes are counted, driven and judged by racer_laps.py.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import inspect
import io
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import gymnasium
import numpy as np
import torch
import torch.distributed as dist
import tyro

from racer.game.bridge import CONNECT_TIMEOUT_S, BridgeError
from racer_env import LONGEST_PAUSE_S, RacerVectorEnv, difference_from_twin, retry_pause_s
from racer.training.evaluation import (
    MANY_TRACKS, RaceStats, describe, describe_all, eval_metrics, evaluate, fastest_lap, hand_written_rewards, lines_of,
    score, summarize,
)  # fmt: skip
from racer.game.sim import OBS_HIGH, OBS_LOW, OBS_SIZE

CHECKPOINT_FORMAT = 3
MAY_CHANGE = (  # when a run is resumed
    *("total_timesteps", "run_dir", "bridge_url", "bridge_retries"),
    *("eval_every", "checkpoint_every", "tensorboard", "save_buffer"),
)
NOT_SETTINGS = ("start_from", "resume", "evaluate", "episodes", "json", "export", "checkpoint")  # what to do, not how
ANSWER_TIMEOUT_S = 45.0  # another process that has not answered for so long is considered dead
RANK_SEED_STRIDE = 1_000_003  # between the random numbers of the processes of a run
EXIT_ERROR, EXIT_USAGE, EXIT_BRIDGE, EXIT_PROCESS, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 3, 4, 130, 143
KNOWN_TO_ALL = (0, EXIT_BRIDGE, EXIT_INTERRUPTED, EXIT_TERMINATED)  # ends that every process of a run knows of

# == 1  MetricsLogger ==================================================================================================


class MetricsLogger:
    """Scalars by tag, written at `dump(step)` to TensorBoard and to metrics.csv in `folder`.

    resume_step: continue the folder of an earlier run from that step; later rows are removed.
    If TensorBoard or the file cannot be written, it warns once, and training continues.
    """

    def __init__(self, folder: str | Path, resume_step: int | None = None, tensorboard: bool = True):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.csv_path = self.folder / "metrics.csv"
        self._values: dict[str, float] = {}
        rows = read_csv(self.csv_path) if resume_step is not None else []
        self._rows = [row for row in rows if int(float(row["step"])) <= resume_step]
        self._columns = list(self._rows[0]) if self._rows else []
        self._writer, self._failed = None, set()
        self._try("metrics.csv", self._write_rows)
        if tensorboard:
            self._try("TensorBoard", lambda: self._open_tensorboard(resume_step))

    def _try(self, target: str, write: Callable) -> None:
        """Write, unless it has failed before: no package, no room on the disk, a folder that has gone."""
        if target not in self._failed:
            try:
                write()
            except Exception as error:
                self._failed.add(target)
                warnings.warn(f"{self.folder}: {target} cannot be written ({error}); the run goes on", stacklevel=4)

    def _open_tensorboard(self, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if threading.excepthook.__module__ != __name__:
            threading.excepthook = _without_tensorboard(threading.excepthook)
        self._writer = SummaryWriter(str(self.folder), purge_step=None if resume_step is None else resume_step + 1)

    def _to_tensorboard(self, method: str, *arguments, **named) -> None:
        if self._writer is not None:
            self._try("TensorBoard", lambda: getattr(self._writer, method)(*arguments, **named))

    def record(self, key: str, value: float) -> None:
        """The last value recorded before a dump is the one that counts."""
        self._values[key] = float(value)

    def text(self, key: str, text: str) -> None:
        self._to_tensorboard("add_text", key, text, 0)

    def picture(self, key: str, image: np.ndarray, step: int) -> None:
        """An (H, W, 3) uint8 picture for the Images tab."""
        self._to_tensorboard("add_image", key, image, step, dataformats="HWC")

    def animation(self, key: str, gif: bytes, step: int) -> None:
        """An encoded GIF for the Images tab, where it plays."""
        if self._writer is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            value = Summary.Value(tag=key, image=Summary.Image(encoded_image_string=gif, colorspace=3))
            self._try("TensorBoard", lambda: self._writer.file_writer.add_summary(Summary(value=[value]), step))

    def dump(self, step: int) -> dict[str, float]:
        """Write everything recorded since the last dump under this step, and start afresh. -> what was written"""
        values, self._values = self._values, {}
        for key, value in values.items():
            self._to_tensorboard("add_scalar", key, value, step)
        if values:
            self._rows.append({"step": step, **values})
            new = [key for key in self._rows[-1] if key not in self._columns]
            self._columns += new
            self._try("metrics.csv", self._write_rows if new else self._append_row)
        return values

    def close(self) -> None:
        self._to_tensorboard("close")
        self._writer = None

    def _append_row(self) -> None:
        with self.csv_path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(self._rows[-1])

    def _write_rows(self) -> None:
        """The whole file: a new column makes the header longer, and a resumed run has fewer rows."""
        temporary = self.csv_path.with_suffix(".csv.tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(self._rows)
        os.replace(temporary, self.csv_path)


def _without_tensorboard(hook):
    """TensorBoard writes in a thread of its own. Its next call reports an error there, so a traceback is not needed."""
    return lambda args: None if type(args.thread).__module__.startswith("tensorboard.") else hook(args)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a metrics file, none if there is no file. A last line cut short by a crash is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
    return [row for row in rows if None not in row and None not in row.values() and row["step"]]


# == 2  The terminal ===================================================================================================


def say(text: str, end: str = "\n", to: str = "stdout") -> None:
    """Print. Where that fails (`| head` has gone, the disk under a log is full), stay silent: it must not end the run."""
    # ValueError: the stream is closed. RuntimeError: a signal comes in the middle of a print.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        print(text, end=end, file=getattr(sys, to), flush=True)


def warn(text: str) -> None:
    say(text, to="stderr")


class Clock:
    """Where the time goes: `with clock("learning"): ...` adds up per name."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str):
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


class Progress:
    """A line that stays in place in a terminal; a plain line every 10 % where the output is a file or a pipe."""

    REFRESH_S = 0.2

    def __init__(self, total: int, first_step: int):
        self.total, self.first_step, self.began = total, first_step, time.perf_counter()
        self.live = sys.stdout is not None and sys.stdout.isatty()
        self._next_line, self._next_refresh = first_step, 0.0

    def show(self, steps: int, best_noisy_lap_sec: float, metrics: dict) -> None:
        now = time.perf_counter()
        if now < self._next_refresh if self.live else steps < self._next_line:
            return
        self._next_refresh, self._next_line = now + self.REFRESH_S, steps + self.total // 10
        rate = (steps - self.first_step) / max(now - self.began, 1e-9)
        left = round(max(self.total - steps, 0) / max(rate, 1e-9))
        share, lap = min(steps / self.total, 1), best_noisy_lap_sec
        text = f"{steps:>11,} steps {share:4.0%}  {rate:>9,.0f}/s  {left // 60}:{left % 60:02} left"
        text += "  no lap yet" if math.isinf(lap) else f"  best lap with noise {lap:.2f} s"
        if "racer/completion_rate" in metrics:
            text += f"  {metrics['racer/completion_rate']:4.0%} lapped"
        self.say(text, end="" if self.live else "\n")

    def say(self, text: str, end: str = "\n") -> None:
        """A line that stays, unless it has no end."""
        width = shutil.get_terminal_size().columns - 1
        say(f"\r{text[: None if end else width]:<{width}}" if self.live else text, end)


# == 3  Processes: this one alone, or as many as torchrun has started, on one machine or several (gloo) ================

_store: dist.Store | None = None  # torchrun's memory, which lasts when it starts the processes again
_group: dist.ProcessGroup | None = None  # all processes
_other_core: ThreadPoolExecutor | None = None


class ProcessError(RuntimeError):
    """Another process of the run has died, or does not answer any more."""


def world_size() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def rank() -> int:
    """Which of them this is. The first one, 0, evaluates, logs and writes."""
    return int(os.environ.get("RANK") or 0) if world_size() > 1 else 0


def init_processes() -> None:
    """Meet the other processes of torchrun, if there are any."""
    global _store
    if world_size() == 1:
        return
    env, timeout = os.environ, timedelta(seconds=ANSWER_TIMEOUT_S)
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]:
        found = f"WORLD_SIZE is {world_size()}, but {', '.join(missing)} is not set"
        raise ValueError(f"{found}; start several processes with torchrun, or unset WORLD_SIZE")
    is_master = rank() == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    with _others_must_answer():
        _store = dist.TCPStore(*address, is_master=is_master, timeout=timeout, use_libuv=sys.platform != "win32")
        # After a restart the store still holds the addresses of dead processes, so every attempt has a part of its own.
        attempt = dist.PrefixStore(f"attempt-{env.get('TORCHELASTIC_RESTART_COUNT', 0)}", _store)
        dist.init_process_group("gloo", store=attempt, rank=rank(), world_size=world_size(), timeout=timeout)


def be_patient(retries: int) -> None:
    """From now on, wait for processes that wait for a bridge and connect again up to so many times."""
    global _group
    if retries and dist.is_initialized():
        seconds = ANSWER_TIMEOUT_S + retries * (LONGEST_PAUSE_S + CONNECT_TIMEOUT_S)
        _group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))


def remember(key: str, value: str) -> None:
    """Tell it to torchrun's next attempt, if there is one."""
    if _store is not None:
        _store.set(key, value)


def remembered(key: str) -> str | None:
    return _store.get(key).decode() if _store is not None and _store.check([key]) else None


@contextlib.contextmanager
def _others_must_answer():
    try:
        yield
    except RuntimeError as error:
        found = f"process {rank()} of {world_size()}: another one of this run has died or does not answer"
        raise ProcessError(f"{found} ({str(error).strip()[:160]})") from error


def all_gather(value) -> list:
    """The value of every process, in order. If one sends an exception, all raise it."""
    values = [value]
    if dist.is_initialized():
        values *= world_size()
        with _others_must_answer():
            dist.all_gather_object(values, value, group=_group)
    for error in values:
        if isinstance(error, Exception):
            error.shared = True
            raise error
    return values


def together(function: Callable, *arguments, **named):
    """Every process calls the function. The error of one is raised by all."""
    result = _result_or_error(function, *arguments, **named)
    all_gather(result if isinstance(result, Exception) else None)
    return result


def from_first(function: Callable, *arguments):
    """Only the first process calls the function; all get its result, or its error."""
    return all_gather(_result_or_error(function, *arguments) if rank() == 0 else None)[0]


def _result_or_error(function: Callable, *arguments, **named):
    try:
        return function(*arguments, **named)
    except (BridgeError, ValueError, OSError) as error:
        return error


def average_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Between backward() and step(): replace gradients by their mean over all processes."""
    if dist.is_initialized():
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        with _others_must_answer():
            dist.all_reduce(flat, group=_group)
        parts = (flat / world_size()).split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, parts, strict=True):
            gradient.copy_(mean.view_as(gradient))


def make_generator(seed: int) -> torch.Generator:
    """Random numbers of this process alone."""
    return torch.Generator().manual_seed(seed + RANK_SEED_STRIDE * rank())


def make_envs(args) -> RacerVectorEnv:
    """This process's share of the cars."""
    size, place, urls = world_size(), rank(), args.bridge_url
    cars, tracks = args.num_envs // size, len(args.track_id)
    if args.num_envs % size or cars < tracks:
        needed = f"a multiple of the number of processes ({size}), and give each a car on every track ({tracks})"
        raise ValueError(f"--num-envs is {args.num_envs}; it must be {needed}")
    own_urls = urls[place::size] or urls[place % max(len(urls), 1) :][:1]
    return together(
        RacerVectorEnv, cars, args.track_id, args.config_path, own_urls or None, args.start,
        retries=args.bridge_retries, stagger=True, first_car=place * cars, patience=args.patience,
        off_road_price=args.off_road_price,
    )  # fmt: skip


def on_two_cores(first: Callable, second: Callable) -> tuple:
    """What both give, called at the same time. One after the other if each of several processes has a core only."""
    global _other_core
    if world_size() > 1:
        return first(), second()
    _other_core = _other_core or ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=[1])
    other = _other_core.submit(second)
    return first(), other.result()


def leave(code: int) -> None:
    """End the process at once. Python's own clean-up would take half a second, and threads of gloo can abort it."""
    if code in KNOWN_TO_ALL:  # then wait for the others: torchrun ends all as soon as one has failed
        with contextlib.suppress(RuntimeError):
            all_gather(None)
    for stream in ("stdout", "stderr"):
        say("", end="", to=stream)  # flushes it
    os._exit(code)


# == 4  Files: checkpoints and the run folder ==========================================================================


def tensors(value):
    """NumPy arrays as tensors, through dicts and lists: a file of tensors and plain values loads without running code."""
    if isinstance(value, dict):
        return {key: tensors(item) for key, item in value.items()}
    if isinstance(value, list):
        return [tensors(item) for item in value]
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


@contextlib.contextmanager
def _must_fit():
    """Around the loading of a checkpoint's parts."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"the checkpoint does not fit this program or its settings: {reason}") from error


def restored(saved, own):
    """The state of a part as it was before `tensors`: arrays where its own state of now has arrays."""
    if not isinstance(own, dict):
        return saved
    return {key: item.numpy() if isinstance(own.get(key), np.ndarray) else item for key, item in saved.items()}


def write_checkpoint(path: Path, checkpoint: dict) -> bool:
    """The whole file or none: if it fails, the old file stays. -> whether it worked"""
    temporary, buffer = path.with_name(f"{path.name}.tmp"), io.BytesIO()
    torch.save(tensors(checkpoint), buffer)
    try:
        with temporary.open("wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        reason = error.strerror or error
        warn(f"WARNING: {path} could not be written ({reason}); the one before it is untouched. Make room")
        return False
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True


def load_checkpoint(path: str | Path, algorithm: str | None, prefer: str = "checkpoint.pt") -> dict:
    """A checkpoint from a file or a run folder. No code in it is run. ValueError if it is not one of this algorithm, if given."""
    path = Path(path)
    if path.is_dir():
        there = [path / name for name in (prefer, "checkpoint.pt", "best.pt") if (path / name).exists()]
        path = there[0] if there else path / prefer
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a checkpoint (.pt) or a run folder that has one, e.g. runs/NAME")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds: truncated, no checkpoint at all, a pickle with code in it
        reason = str(error).strip()[:120].partition("\n")[0]
        reason = "not a file of tensors" if reason.startswith("Weights only") else reason
        other = "checkpoint.pt" if "best" in path.name else "best.pt"
        found = f"{path} is no checkpoint, or a damaged one ({reason})"
        raise ValueError(f"{found}. Nothing in it was run. Take another, e.g. {other} beside it") from error
    found = checkpoint.get("algorithm") if isinstance(checkpoint, dict) else None
    if found is None or algorithm not in (found, None):
        what = f"a checkpoint of {found}_racer.py; load it with that" if found else "a file of torch, but no checkpoint"
        raise ValueError(f"{path} is {what}")
    if checkpoint.get("format") != CHECKPOINT_FORMAT or not {"args", "parts", "config", "run"} <= set(checkpoint):
        found = f"{path} has format {checkpoint.get('format')}, this program reads {CHECKPOINT_FORMAT}"
        raise ValueError(f"{found}: another version wrote it. Use that version, or train anew")
    return checkpoint


def plain_settings(args) -> dict:
    """Args as plain values for a checkpoint or JSON. Files by their full path, so that a run can go on from elsewhere."""
    settings = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if isinstance(value, Path):
            value = str(value.resolve()) if value != field.default else None
        if isinstance(value, tuple):
            value = [str(Path(v).resolve()) if v.lower().endswith(".json") else v for v in value]
        if field.name not in NOT_SETTINGS and value is not None:
            settings[field.name] = value
    return settings


def saved_args(Args, settings: dict):
    """The settings of a checkpoint. A flag that is newer than the checkpoint has its default; one that is gone is named."""
    fields = {field.name: field.default for field in dataclasses.fields(Args)}
    if gone := sorted(set(settings) - set(fields)):
        warn(f"the checkpoint has settings that this program does not know, and goes on without: {', '.join(gone)}")
    kept = {name: value for name, value in settings.items() if name in fields}
    return Args(**{n: type(fields[n])(v) if isinstance(fields[n], (Path, tuple)) else v for n, v in kept.items()})


def make_run_folder(algorithm: str, args) -> Path:
    """runs/NAME with the settings, the versions and the commit that made it."""
    tracks = "-".join(Path(track).stem for track in args.track_id[:3])
    tracks = f"random-1-to-{args.random_tracks}" if args.random_tracks else tracks
    name = args.run_name or f"{algorithm}-{tracks}-s{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    if Path(name).name != name or name == "..":
        raise ValueError(f"--run-name is {name!r}, which is a path; give a name, and the folder above it as --run-dir")
    folder, number = args.run_dir / name, 2
    while not args.run_name and folder.exists():
        folder, number = args.run_dir / f"{name}-{number}", number + 1
    own = remembered("folder") == str(folder)  # torchrun has started the processes again
    if folder.is_dir() and any(folder.iterdir()) and not own:
        go_on = f"go on with it (--resume {folder}), or " if (folder / "checkpoint.pt").exists() else ""
        raise ValueError(f"{folder} is not empty; {go_on}give another --run-name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "args.json").write_text(json.dumps({"args": plain_settings(args), **provenance()}, indent=2))
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}); choose another --run-dir") from error
    remember("folder", str(folder))
    return folder


def resumed_folder(path: Path) -> Path:
    """The run folder to go on in."""
    folder = path if path.is_dir() else path.parent
    if not (folder / "args.json").exists():
        raise ValueError(f"{folder} is no run folder (it has no args.json); put the checkpoint into one")
    return folder


def provenance() -> dict:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    versions |= {"gymnasium": gymnasium.__version__, "system": platform.platform()}
    commit = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
        here = Path(__file__).resolve().parent
        commit = subprocess.run(git, cwd=here, capture_output=True, text=True, timeout=5).stdout.strip() or None
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {"command": command, "commit": commit, "versions": versions, "processes": world_size()}


# == 5  Run ============================================================================================================


class Run:
    """One training run, new or resumed: `with Run("ppo", args, envs, parts) as run: while not run.done: ...`

    `parts` names what a checkpoint holds beside the settings and the counts (None is left out). An object with `state_dict` is
    the same in all processes. One with `get_state` belongs to a process, and is saved as a list with an entry per process.
    Saving and restoring read the same dict.

    Ctrl+C and SIGTERM ask for an orderly end: the iteration is finished, a checkpoint written. With one process, a second one
    ends at once.
    """

    def __init__(self, algorithm: str, args, envs: RacerVectorEnv, parts: dict):
        self.algorithm, self.args, self.envs, self.clock = algorithm, args, envs, Clock()
        self.eval_envs: RacerVectorEnv | None = None
        self.stats = RaceStats(envs.num_envs, envs.config["episode"]["maxSteps"], args.patience)
        self.parts = {**parts, "stats": self.stats}
        self.steps = self._steps_before = 0
        self.best = {"score": -math.inf, "step": 0, "results": [], "laps": []}
        self.hand_written: dict[str, float] = {}  # that driver's rewards by track, if there are several
        self.metrics: dict[str, float] = {}
        self.saved = True
        self.stopped: int | None = None  # the signal that stops all processes
        self._signal: int | None = None  # the one that has come here
        self.seconds_before, self._began = 0.0, time.perf_counter()

    def __enter__(self) -> Run:
        try:
            self._begin()
        except BaseException:
            self.envs.close()
            raise
        return self

    def _begin(self) -> None:
        args = self.args
        self._difference = from_first(self._difference_from_twin)
        if args.resume is None:
            self.stats.begin(together(self.envs.reset, seed=args.seed)[1])
            if args.start_from is not None:
                first = from_first(load_checkpoint, args.start_from, self.algorithm, "best.pt")["parts"]
                with _must_fit():
                    self.parts["agent"].load_state_dict(first["agent"])
                    scaler = self.parts["scaler"]  # what the critics have learned is of that scale
                    scaler.set_state(restored(first["scaler"][0], scaler.get_state()))
                scaler.begin_anew()
            self.folder = from_first(make_run_folder, self.algorithm, args)
        else:
            self.folder = from_first(resumed_folder, args.resume)
            self._restore(from_first(load_checkpoint, args.resume, self.algorithm))
        for part in self.parts.values():
            if isinstance(part, torch.nn.Module):  # other machines may round otherwise
                part.load_state_dict(from_first(part.state_dict))
        from_first(self._open)
        self._handlers = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not in the main thread: somebody else has the signals
                self._handlers[number] = signal.signal(number, self._on_signal)

    def _difference_from_twin(self) -> str:
        """Why the embedded engine cannot stand for the game in evaluations, if so."""
        args, url = self.args, self.args.bridge_url[:1]
        for attempt in range(args.bridge_retries + 1):
            try:
                found = (difference_from_twin(track, args.config_path, url[0]) for track in args.track_id if url)
                return next((text for text in found if text), "")
            except BridgeError:
                if attempt == args.bridge_retries:
                    raise
                time.sleep(retry_pause_s(attempt))

    def _restore(self, checkpoint: dict) -> None:
        if checkpoint["config"] != self.envs.config:
            raise ValueError(
                f"the rewards or limits in {self.args.config_path} are not those that the run began with "
                f"({json.dumps(checkpoint['config'])}); put them back, or start a new run"
            )
        with _must_fit():
            saved, processes = checkpoint["parts"], len(checkpoint["parts"]["stats"])
            as_many = processes == world_size()
            cars_go_on = as_many and saved["envs"][0] and self.envs.get_state()  # the real game exposes no state
            for name, part in self.parts.items():
                if part is None or name not in saved:
                    lack = f"the checkpoint holds no {name}: the run has a new one, and is not the same bit for bit"
                    from_first(say, lack)
                elif hasattr(part, "state_dict"):
                    part.load_state_dict(saved[name])
                elif name == "scaler" or (cars_go_on if name == "envs" else as_many):
                    part.set_state(restored(saved[name][rank() if as_many else 0], part.get_state()))
            for name, value in checkpoint["run"].items():
                setattr(self, name, value)
            self.best["laps"] = [{**lap, "places": lap["places"].numpy()} for lap in self.best["laps"]]
        if not as_many:
            change = f"{world_size()} instead of {processes} processes"
            from_first(say, f"going on with {change}: the cars begin anew, and not bit for bit")
        if not cars_go_on:
            self.stats.begin(together(self.envs.reset, seed=self.args.seed + self.steps)[1])
            for part in self.parts.values():
                if hasattr(part, "begin_anew"):
                    part.begin_anew()

    def _open(self) -> None:
        """In the first process: what evaluates, logs and shows."""
        args, resumed, difference = self.args, self.args.resume is not None, self._difference
        url = args.bridge_url[:1]
        self.eval_envs = RacerVectorEnv(
            len(args.track_id), args.track_id, args.config_path, url if difference else None,
            render_mode=None if difference else "rgb_array", retries=args.bridge_retries,  # a twin draws
        )  # fmt: skip
        if len(args.track_id) > 1 and not difference:
            self.hand_written = hand_written_rewards(args.track_id, args.config_path)
        self.logger = MetricsLogger(self.folder, self.steps if resumed else None, tensorboard=args.tensorboard)
        rows = [f"| {name} | {value} |" for name, value in plain_settings(args).items()]
        self.logger.text("hyperparameters", "\n".join(["| | |", "|-|-|", *rows]))
        self.terminal = Progress(args.total_timesteps, self.steps)
        tracks = ", ".join(args.track_id) if len(args.track_id) <= MANY_TRACKS else f"{len(args.track_id)} tracks"
        text = f"{self.folder}: {args.num_envs} cars on {tracks}"
        text += f" in the game at {', '.join(args.bridge_url)}" if args.bridge_url else ""
        text += f", {world_size()} processes" if world_size() > 1 else ""
        if url:
            text += "; evaluated " + (f"in the game, since {difference}" if difference else "on the embedded engine")
        self.terminal.say(text + (f", going on from step {self.steps:,}" if resumed else ""))

    def _on_signal(self, number, _frame) -> None:
        if self._signal == number and world_size() == 1:
            raise KeyboardInterrupt
        if self._signal is None and rank() == 0:
            warn("\nstopping: finishing this iteration, then saving")
        self._signal = self._signal or number
        for envs in (self.envs, self.eval_envs):
            if envs is not None:
                envs.retries = 0  # a bridge that is away is not waited for

    # -- what the training loop asks for -------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.steps >= self.args.total_timesteps

    @property
    def done(self) -> bool:
        """Finished, or stopped by a signal."""
        return self.finished or self.stopped is not None

    @property
    def progress(self) -> float:
        """How much of the run is behind it, from 0 to 1."""
        return min(self.steps / self.args.total_timesteps, 1.0)

    @property
    def seconds(self) -> float:
        """How long the run has taken, all sessions together."""
        return self.seconds_before + time.perf_counter() - self._began

    def due(self, every: int) -> bool:
        """Whether the last iteration went past a multiple of so many steps, or was the last."""
        return self.finished or self.steps // every > self._steps_before // every

    def advance(self, steps: int, metrics: dict[str, float]) -> None:
        """An iteration is over: take in what it brought, in all processes."""
        self.check(metrics)
        self._steps_before, self.steps, self.metrics = self.steps, self.steps + steps, metrics
        rollouts = all_gather(self.stats.take())
        if rank() == 0:
            self.stats.log(self.logger, rollouts)

    def check(self, metrics: dict[str, float]) -> None:
        """Learning that has blown up ends the run here, before it reaches a checkpoint or the cars."""
        wrong = [f"{name} has become {value}" for name, value in metrics.items() if not math.isfinite(value)]
        for name, part in self.parts.items():
            if isinstance(part, torch.nn.Module):
                weights = torch.nn.utils.parameters_to_vector(part.parameters())
                wrong += [] if weights.isfinite().all() else [f"weights of the {name} have become infinite or NaN"]
        if wrong:
            raise FloatingPointError(f"{wrong[0]} after step {self.steps:,}")

    def evaluate(self, drive: Callable) -> None:
        """An episode per track from the grid, without noise. The best driver so far is saved as best.pt."""
        with self.clock("evaluation"):
            better = from_first(self._evaluate, drive)
        if better is not None:
            before, self.best = self.best, better
            if not self.save("best.pt"):
                self.best = before
            elif rank() == 0:
                self._draw(better["laps"])

    def _evaluate(self, drive: Callable) -> dict | None:
        episodes = evaluate(drive, self.eval_envs, self.args.track_id, whole=False)
        results = [summarize([e], self.eval_envs.config, self.hand_written.get(e.track)) for e in episodes]
        for name, value in eval_metrics(results).items():
            self.logger.record(name, value)
        for line in lines_of(results):
            self.terminal.say(f"{self.steps:>11,} steps  {self.seconds:5.1f} s  {line}")
        if score(episodes) <= self.best["score"]:
            return None
        laps = [lap for episode in episodes[:MANY_TRACKS] if (lap := fastest_lap(episode))]
        return {"score": score(episodes), "step": self.steps, "results": results, "laps": laps}

    def _draw(self, laps: list[dict], replay: bool = False) -> None:
        """A lap of every track as a racing line or as a replay, to TensorBoard and the run folder. Errors only warn."""
        try:
            with self.clock("pictures"):
                from racer.view.pictures import draw_lap, save_picture

                for lap in laps:
                    name = Path(lap["track_id"]).stem
                    tag, suffix = ("", "") if len(self.args.track_id) == 1 else (f"{name}/", f"-{name}")
                    picture = draw_lap(**lap, replay=replay)
                    if replay:
                        self.logger.animation(f"eval/{tag}replay", picture, self.steps)
                        (self.folder / f"replay{suffix}.gif").write_bytes(picture)
                    else:
                        self.logger.picture(f"eval/{tag}racing_line", picture, self.steps)
                        save_picture(self.folder / f"racing_line{suffix}.png", picture)
        except Exception as error:  # no Pillow, no room
            warnings.warn(f"no picture of the best lap ({error!r}); training goes on", stacklevel=2)

    def log(self) -> None:
        """A row of metrics. And every process hears whether one of them was told to stop."""
        faults = self.envs.bridge_faults + (self.eval_envs.bridge_faults if self.eval_envs else 0)
        everyone = all_gather({"metrics": self.metrics, "signal": self._signal, "faults": faults})
        self.stopped = next((process["signal"] for process in everyone if process["signal"]), None)
        if rank() > 0:
            return
        with self.clock("logging"):
            for name in self.metrics:
                self.logger.record(name, np.mean([process["metrics"][name] for process in everyone]))
            if self.args.bridge_url:
                self.logger.record("racer/bridge_faults", sum(process["faults"] for process in everyone))
            self.logger.record("time/fps", self.steps / self.seconds)
            for name, seconds in self.clock.seconds.items():
                self.logger.record(f"time/{name}_sec", seconds)
            self.terminal.show(self.steps, self.stats.best_lap_sec, self.logger.dump(self.steps))

    def save(self, name: str = "checkpoint.pt") -> bool:
        """The whole run as one file. -> whether it is on the disk"""
        with self.clock("checkpoints"):
            parts = {
                key: part.state_dict() if hasattr(part, "state_dict") else all_gather(part.get_state())
                for key, part in self.parts.items()
                if part is not None
            }
            checkpoint = {
                "algorithm": self.algorithm,
                "format": CHECKPOINT_FORMAT,
                "args": plain_settings(self.args),
                "config": self.envs.config,
                "parts": parts,
                "run": {"steps": self.steps, "seconds_before": self.seconds, "best": self.best},
            }
            if rank() == 0 and name == "checkpoint.pt":
                remember("saved", str(self.folder.resolve()))
            self.saved = from_first(write_checkpoint, self.folder / name, checkpoint)
        return self.saved

    # -- the end -------------------------------------------------------------------------------------------------------

    def __exit__(self, _kind, error, _traceback) -> None:
        if error is not None:
            error.folder = self.folder
        if isinstance(error, BridgeError):
            if not getattr(error, "shared", False):  # the others wait in an all_gather for what was driven
                with contextlib.suppress(BridgeError):
                    all_gather(error)
            if not self.save():  # as after the last update; what was driven since is lost
                del error.folder
        self.envs.close()
        if rank() == 0:
            self.eval_envs.close()
            self.logger.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def report(self) -> dict:
        """The summary: what was reached, where it is, what to type next."""
        args, folder, clock = self.args, self.folder, self.clock.seconds
        reached = {"run_folder": str(folder), "steps": self.steps, "finished": self.finished, "signal": self.stopped}
        if rank() > 0:
            return {**reached, "saved": self.saved}
        if self.finished:
            self._draw(self.best["laps"], replay=True)
        session, driven = self.seconds - self.seconds_before, self.steps - self.terminal.first_step
        rate = driven / max(session - clock.get("evaluation", 0.0), 1e-9)
        if not driven:
            total = f"{args.total_timesteps:,} steps; --total-timesteps extends it"
            say(f"\nnothing to do: the run is at {self.steps:,} of {total}")
        here = f", {session:.1f} s of them in this session" if self.seconds_before else ""
        how = "done" if self.finished else "stopped"
        say(f"\n\n{how}: {self.steps:,} steps in {self.seconds:.1f} s{here}; {rate:,.0f} steps/s without evaluation")
        clock["rest"] = max(session - sum(clock.values()), 0.0)
        shares = sorted(clock.items(), key=lambda item: -item[1])
        say("time      " + ", ".join(f"{name} {s:.1f} s ({s / session:.0%})" for name, s in shares))
        if self.best["results"]:
            lines = [*lines_of(self.best["results"]), f"at step {self.best['step']:,}"]
            say("best      " + "\n          ".join(lines))
        files = ("best.pt", "checkpoint.pt", "metrics.csv", "racing_line*.png", "replay*.gif")
        there = [path.name for name in files for path in sorted(folder.glob(name))]
        say(f"files     {folder}: {', '.join(there)}")
        if not self.finished:
            say(f"go on     {command()} --resume {shlex.quote(str(folder))}")
        if "best.pt" in there:
            say(f"evaluate  python {shlex.quote(sys.argv[0])} --evaluate {shlex.quote(str(folder / 'best.pt'))}")
        say(f"look      tensorboard --logdir {shlex.quote(str(folder.parent))}")
        reached |= {"saved": self.saved, "seconds": self.seconds, "steps_per_sec": rate, "clock": clock}
        return {**reached, "best": self.best}


# == 6  Command line ===================================================================================================


def _count(words: list[str]) -> int:
    value = float(words[0].replace("_", ""))
    if not 1 <= value < 2**53 or value != int(value):
        raise ValueError(f"{words[0]} is not a whole number, 1 or more, like 2000000, 2_000_000 or 2e6")
    return int(value)


# A number of steps, cars or the like, as an annotation in Args.
Count = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        1, "N", _count, is_instance=lambda value: isinstance(value, int), str_from_instance=lambda value: [str(value)]
    ),
]


def mean_metrics(history: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([metrics[name] for metrics in history])) for name in history[0]} if history else {}


def first_look(argv: list[str]) -> argparse.Namespace:
    """What the defaults depend on. ValueError for flags that make no sense together, or alone."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("start-from", "resume", "evaluate", "json", "export", "checkpoint"):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}")
    for name in ("track-id", "bridge-url"):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", nargs="*")
    parser.add_argument("--random-tracks", "--random_tracks", type=int, default=0)
    parser.add_argument("--slow-game", "--slow_game", action=argparse.BooleanOptionalAction)
    parser.add_argument("-h", "--help", action="store_true")
    look = parser.parse_known_args(argv)[0]
    tasks = [f"--{n.replace('_', '-')}" for n in ("start_from", "resume", "evaluate", "export") if getattr(look, n)]
    if len(tasks) > 1:
        raise ValueError(f"{' and '.join(tasks)} are different tasks; give one of them")
    for flag, other in (("export", "checkpoint"), ("checkpoint", "export"), ("json", "evaluate")):
        if getattr(look, flag) and not getattr(look, other):
            raise ValueError(f"--{flag} needs --{other} as well")
    if look.random_tracks and look.track_id:
        raise ValueError("--random-tracks and --track-id both name tracks; give one of them")
    if look.bridge_url == []:
        raise ValueError("--bridge-url has no URL; give one like ws://localhost:9876, or leave the flag out")
    return look


def read_args(Args, presets: dict[str, dict], algorithm: str, argv: list[str], doc: str = ""):
    """The command line as Args. A first look at it chooses the defaults, tyro reads the rest."""
    look = first_look(argv)
    if saved := look.resume or look.evaluate or look.checkpoint:
        prefer = "checkpoint.pt" if look.resume else "best.pt"
        preset = saved_args(Args, from_first(load_checkpoint, saved, algorithm, prefer)["args"])
        changes = {} if look.resume else {"start": "grid", "bridge_url": ()}
    else:
        preset = Args()
        slow = look.bridge_url or look.slow_game
        several = "random tracks" if look.random_tracks else "several tracks" if len(look.track_id or ()) > 1 else None
        changes = presets.get(several, {}) | (presets["start from"] if look.start_from else {})
        changes |= {**presets["slow game"], "slow_game": bool(look.slow_game)} if slow else {}
        if look.start_from:  # networks of the same size, which see the same
            networks = from_first(load_checkpoint, look.start_from, algorithm, "best.pt")["args"]
            changes |= {name: networks[name] for name in ("hidden", "hide_arc") if name in networks}
        changes |= {"start": "grid"} if slow else {}  # the game has no other
    if look.random_tracks and not look.resume:
        tracks = tuple(f"random-{number}" for number in range(1, look.random_tracks + 1))
        changes |= {"random_tracks": look.random_tracks, "track_id": tracks}
    preset = dataclasses.replace(preset, **changes)
    if look.help:
        say(help_text(Args, preset, doc))
        leave(0)
    args = tyro.cli(Args, args=argv, default=preset)
    for field in dataclasses.fields(args) if look.resume else ():
        new, old = getattr(args, field.name), getattr(preset, field.name)
        if new != old and field.name not in (*MAY_CHANGE, *NOT_SETTINGS):
            flag = f"--{field.name.replace('_', '-')}"
            raise ValueError(f"{flag} is {new}, but the run to resume has {old}, and that cannot change")
    return args


def help_text(Args, preset, doc: str) -> str:
    """One line a flag, in the groups of Args, with the default that holds for this command line."""
    lines, name = ["\n\n".join(doc.split("\n\n")[:2])], None
    for line in inspect.getsource(Args).splitlines():
        if group := re.match(r"    # -- (.*)", line):
            lines += ["", f"{group[1]}:"]
        elif field := re.match(r"    (\w+): .* = ", line):
            name = field[1]
        elif (text := re.match(r'    """(.*)"""', line)) and name:
            value, flag = getattr(preset, name), name.replace("_", "-")
            if isinstance(value, bool):
                flag, value = f"[no-]{flag}", "yes" if value else "no"
            elif isinstance(value, tuple):
                value = " ".join(value if len(value) <= 3 else (*value[:3], "..."))
            elif isinstance(value, (Path, int)):
                value = value.name if isinstance(value, Path) else f"{value:,}"
            lines.append(f"  --{flag:<20} {text[1]}" + (f" ({value})" if value not in (None, "") else ""))
            name = None
    return "\n".join(lines)


def command() -> str:
    """How this program was started, for telling people how to go on."""
    program, here = shlex.quote(sys.argv[0]), os.environ.get("LOCAL_WORLD_SIZE")
    if world_size() == 1 or here is None:
        return f"python {program}"
    machines = world_size() // int(here)
    return f"torchrun {f'--nnodes={machines} ' if machines > 1 else ''}--nproc_per_node={here} {program}"


# What ends a run: exit code, what to say of it, and what before the command that goes on.
ENDS: dict[type, tuple[int, str, str]] = {
    BridgeError: (EXIT_BRIDGE, "", "\nSaved; go on with: "),
    ProcessError: (EXIT_PROCESS, ". The run ends", "; go on from the last checkpoint, if there is one, with: "),
    FloatingPointError: (EXIT_ERROR, ". Learning has blown up; start again with a smaller --learning-rate", ""),
    ValueError: (EXIT_USAGE, "", ""),
    OSError: (EXIT_USAGE, "", ""),
    KeyboardInterrupt: (EXIT_INTERRUPTED, "stopped at once; --resume goes on from the last checkpoint, if there is one", ""),
}  # fmt: skip


def run_command(algorithm: str, Args, presets: dict, make_agent: Callable, train: Callable, doc: str) -> int:
    """A trainer's command: train, evaluate or export, and say what went wrong. -> exit code"""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter
    program = Path(sys.argv[0]).name
    try:
        init_processes()
        argv = sys.argv[1:]
        saved = remembered("saved")
        if saved and Path(saved, "checkpoint.pt").exists():  # torchrun has started the processes again
            argv = ["--resume", saved]
        args = read_args(Args, presets, algorithm, argv, doc)
        be_patient(args.bridge_retries)
        if args.evaluate or args.export:
            (evaluate_driver if args.evaluate else export_driver)(args, algorithm, make_agent)
            return 0
        result = train(args)
    except tuple(ENDS) as error:
        code, meaning, go_on = next(end for kind, end in ENDS.items() if isinstance(error, kind))
        if hasattr(error, "folder") and go_on:
            meaning += f"{go_on}{command()} --resume {shlex.quote(str(error.folder))}"
        if rank() == 0 or not getattr(error, "shared", False):
            warn(f"\n{program}: {error}{meaning}")
        return code
    if not result["saved"]:
        warn(f"\n{program}: the end of this run is not on the disk; make room, and go on from the last checkpoint: "
             f"{command()} --resume {shlex.quote(result['run_folder'])}")  # fmt: skip
        return EXIT_ERROR
    return 0 if result["finished"] else EXIT_TERMINATED if result["signal"] == signal.SIGTERM else EXIT_INTERRUPTED


def load_driver(path: Path, args, algorithm: str, make_agent: Callable) -> torch.nn.Module:
    """The driver in a checkpoint. It needs the actor only, so a checkpoint with other critics will do."""
    agent, parts = make_agent(args), load_checkpoint(path, algorithm, prefer="best.pt")["parts"]
    needed = [name for name in agent.state_dict() if name.startswith(("actor.", "obs_"))]
    with _must_fit():
        agent.load_state_dict({name: parts["agent"][name] for name in needed}, strict=False)
    return agent


def evaluate_driver(args, algorithm: str, make_agent: Callable) -> list[dict]:
    """`--evaluate`: whole episodes of a trained driver, on the tracks of its training unless others are given."""
    agent, results = load_driver(args.evaluate, args, algorithm, make_agent), []
    torch.set_num_threads(1)  # as in training
    if args.json:
        args.json.touch()  # fail now, not after the drive
    say(f"{args.episodes} episodes a track, from {'the grid' if args.start == 'grid' else 'anywhere'}")
    comparable = args.start == "grid" and not args.bridge_url
    hand_written = hand_written_rewards(args.track_id, args.config_path) if comparable else {}
    for track in args.track_id:
        settings = {"bridge_url": args.bridge_url or None, "start": args.start, "retries": args.bridge_retries}
        with contextlib.closing(RacerVectorEnv(args.episodes, track, args.config_path, **settings)) as envs:
            episodes = evaluate(agent.drive, envs, [track], args.seed)
        results.append(summarize(episodes, envs.config, hand_written.get(track)))
        say(describe(results[-1]))
    if len(results) > 1:
        say(describe_all(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2), encoding="utf-8")
    return results


def export_driver(args, algorithm: str, make_agent: Callable) -> None:
    """`--export`: a driver as the browser game loads it. It normalises observations as the stats say, then asks the model."""
    try:
        import onnx  # noqa: F401  torch.onnx needs it
        import onnxruntime
    except ImportError as error:
        raise ValueError("--export needs packages that are not installed: pip install onnx onnxruntime") from error
    agent, path = load_driver(args.checkpoint, args, algorithm, make_agent), args.export / "model.onnx"
    stats = {"obs_mean": agent.obs_mean.tolist(), "obs_var": agent.obs_var.tolist()}
    stats |= {"clip_obs": agent.NORM_CLIP, "epsilon": agent.NORM_EPSILON}
    args.export.mkdir(parents=True, exist_ok=True)
    (args.export / "vecnorm_stats.json").write_text(json.dumps(stats, indent=2) + "\n", encoding="utf-8")
    names = {"input_names": ["obs"], "output_names": ["actions"], "opset_version": 13}
    names["dynamic_axes"] = {"obs": {0: "batch"}, "actions": {0: "batch"}}
    if "dynamo" in inspect.signature(torch.onnx.export).parameters:
        names["dynamo"] = False  # the newer exporter writes a second file, which a browser does not load
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(agent, (torch.zeros(1, OBS_SIZE),), str(path), **names)
    obs = np.random.default_rng(0).uniform(OBS_LOW, OBS_HIGH, (10_000, OBS_SIZE)).astype(np.float32)
    normalized_obs = (obs - np.float32(stats["obs_mean"])) / np.sqrt(np.float32(stats["obs_var"]) + stats["epsilon"])
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    clipped = np.clip(normalized_obs, -stats["clip_obs"], stats["clip_obs"]).astype(np.float32)
    (actions,) = session.run(None, {"obs": clipped})
    difference = float(np.abs(actions - agent.drive(obs)).max())
    if not difference <= 1e-5:
        raise ValueError(f"the exported model acts otherwise than the checkpoint: its actions differ by {difference:g}")
    say(f"{path}: obs [batch, {OBS_SIZE}], normalised with vecnorm_stats.json -> actions [batch, {actions.shape[1]}]")
    say(f"checked on 10,000 observations: the actions differ by {difference:.1e} at most")
