"""Checkpoints and run folders: one file holds everything that a run needs to continue.

A checkpoint is a dict of tensors and plain values, so that loading it runs no code:

    algorithm, format   which trainer wrote it, in which version of this form
    args                the settings, as plain values
    config              reward weights and limits
    parts               the state of everything that changes while training, by name (see below)
    run                 how far the run is and its best driver so far

A part is any object with one of these pairs of methods:

    state_dict, load_state_dict    a state that is the same in every process, as in torch
    get_state, set_state           a state of this process: a dict of arrays, tensors and plain values. Saved as a list with an
                                   entry per process, and restored if there are as many processes as before
and, optionally,
    merge_states(states)           continue from the states of any number of processes
    on_reset()                     all cars were reset outside of a step, for example on resume
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import typing
from pathlib import Path

import gymnasium
import numpy as np
import torch

from racer.game.tracks import track_name
from racer.training.processes import remember, remembered, world_size
from racer.training.terminal import warn

CHECKPOINT_FORMAT = 4
NEVER = 2**62

# == Checkpoints =======================================================================================================


def write_checkpoint(path: Path, checkpoint: dict) -> bool:
    """Write the file completely or not at all: if it fails, the previous one stays. -> whether it was written"""
    temporary, buffer = path.with_name(f"{path.name}.tmp"), io.BytesIO()
    torch.save(to_tensors(checkpoint), buffer)
    try:
        with temporary.open("wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        previous = "the previous checkpoint is intact" if path.exists() else "there is no checkpoint yet"
        warn(f"WARNING: cannot write {path} ({error.strerror or error}); {previous}. Free disk space")
        return False
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True


def to_tensors(value):
    """NumPy arrays as tensors, through dicts and lists."""
    if isinstance(value, dict):
        return {key: to_tensors(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_tensors(item) for item in value]
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def like(saved, own):
    """A part's saved state: tensors back to NumPy arrays where the part uses arrays."""
    if not isinstance(own, dict):  # the state of a torch.Generator is a tensor
        return saved
    return {key: item.numpy() if isinstance(own.get(key), np.ndarray) else item for key, item in saved.items()}


@contextlib.contextmanager
def must_fit():
    """Around restoring parts: a part that does not fit becomes a ValueError."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"the checkpoint does not fit this program or its settings: {reason}") from error


def find_checkpoint(path: str | Path, prefer: str = "checkpoint.pt") -> Path:
    """A checkpoint's file, given itself or its run folder."""
    path = Path(path)
    if path.is_dir():
        there = [path / name for name in (prefer, "checkpoint.pt", "best.pt") if (path / name).exists()]
        if not there and (path / "args.json").exists():
            raise ValueError(f"{path} was stopped before its first checkpoint; start again with another --run-name")
        path = there[0] if there else path / prefer
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a checkpoint (.pt) or a run folder that has one, e.g. runs/NAME")
    return path


def load_checkpoint(path: str | Path, algorithm: str | None, prefer: str = "checkpoint.pt") -> dict:
    """A checkpoint from a file or a run folder. ValueError unless it is valid and of this algorithm (None: of either)."""
    path = find_checkpoint(path, prefer)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds: truncated, not a checkpoint, a pickle with code in it
        code = str(error).startswith("Weights only")
        reason = "it does not hold tensors alone" if code else "truncated, or not written by torch.save"
        other = "checkpoint.pt" if "best" in path.name else "best.pt"
        found = f"{path} is not a valid checkpoint ({reason})"
        raise ValueError(f"{found}. No code in it was run. Try another file, e.g. {other} beside it") from error
    found = checkpoint.get("algorithm") if isinstance(checkpoint, dict) else None
    if found is None or algorithm not in (found, None):
        what = f"a checkpoint of {found}_racer.py; load it with that" if found else "a torch file, but not a checkpoint"
        raise ValueError(f"{path} is {what}")
    if checkpoint.get("format") == 3 and "parts" in checkpoint:
        upgrade(checkpoint)
    if checkpoint.get("format") != CHECKPOINT_FORMAT or not {"args", "parts", "config", "run"} <= set(checkpoint):
        found = f"{path} has format {checkpoint.get('format')}, this program reads {CHECKPOINT_FORMAT}"
        raise ValueError(f"{found}: another version wrote it. Use that version, or retrain")
    checkpoint["args"].setdefault("action_repeat", 1)  # PPO chose every tick before there was this setting
    return checkpoint


def upgrade(checkpoint: dict) -> None:
    """A checkpoint of format 3, which had other names and counted cut episodes by their length."""
    args, config = checkpoint["args"], checkpoint["config"]
    scale = args["off_road_penalty_scale"] = args.pop("off_road_price", 1.0)
    args["stuck_ticks"] = args.pop("patience", 0)
    args.pop("slow_game", None)
    if args.get("random_tracks"):
        del args["track_id"]
    if scale:
        config["weights"]["offTrackPenalty"] = round(config["weights"]["offTrackPenalty"] / scale, 12)
    for envs in checkpoint["parts"]["envs"]:
        if envs:
            limits = envs.pop("limits")
            envs["countdown"] = torch.where(limits < NEVER, limits - envs["lengths"], NEVER)
    for lap in checkpoint["run"]["best"]["laps"]:
        lap["trajectory"] = lap.pop("places")
    checkpoint["format"] = CHECKPOINT_FORMAT


# == Settings ==========================================================================================================


def plain_settings(args) -> dict:
    """Args as plain values for a checkpoint or JSON. Files are stored by their full path, so that a run can resume elsewhere."""
    settings = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if (value is None and field.default is None) or (isinstance(value, Path) and value == field.default):
            continue
        if isinstance(value, (tuple, list)):
            value = [plain(item) for item in value]
        settings[field.name] = plain(value)
    return settings


def plain(value):
    """A path, or the name of a track file, as its full path; other values as they are."""
    is_file = isinstance(value, Path) or (isinstance(value, str) and value.lower().endswith(".json"))
    return str(Path(value).resolve()) if is_file else value


def saved_args(Args, settings: dict):
    """The settings of a checkpoint as Args. A flag that is newer than the checkpoint has its default; one that is gone is named."""
    kinds = typing.get_type_hints(Args)
    if gone := sorted(set(settings) - set(kinds)):
        warn(f"ignoring settings of the checkpoint that this program does not have: {', '.join(gone)}")
    return Args(**{name: of_kind(value, kinds[name]) for name, value in settings.items() if name in kinds})


def of_kind(value, kind):
    """A plain value as a field of this type: `Path`, `tuple[...]`, or either of them or None."""
    kinds = (kind, *typing.get_args(kind))
    if isinstance(value, list):
        return tuple(of_kind(item, kind) for item in value)
    return Path(value) if Path in kinds and isinstance(value, str) else value


def network_settings(Agent) -> list[str]:
    """The flags that shape the networks: what Agent is made from."""
    return list(inspect.signature(Agent.__init__).parameters)[1:]


# == Run folders =======================================================================================================


def make_run_folder(algorithm: str, args) -> Path:
    """runs/NAME with the settings, the versions and the commit of this run."""
    tracks = "-".join(track_name(track) for track in args.tracks[:3])
    tracks = f"random-1-to-{args.random_tracks}" if args.random_tracks else tracks
    name = args.run_name or f"{algorithm}-{tracks}-s{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    if Path(name).name != name or name == "..":
        raise ValueError(f"--run-name is {name!r}, which is a path; give a name, and the folder above it as --run-dir")
    folder, number = args.run_dir / name, 2
    while not args.run_name and folder.exists():
        folder, number = args.run_dir / f"{name}-{number}", number + 1
    own = remembered("folder") == str(folder)  # torchrun has restarted the processes
    if folder.is_dir() and any(folder.iterdir()) and not own:
        resume = f"resume it (--resume {folder}), or " if (folder / "checkpoint.pt").exists() else ""
        raise ValueError(f"{folder} is not empty; {resume}give another --run-name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "args.json").write_text(json.dumps({"args": plain_settings(args), **provenance()}, indent=2))
    except OSError as error:
        raise ValueError(f"cannot write {folder} ({error.strerror}); choose another --run-dir") from error
    remember("folder", str(folder))
    return folder


def resumed_folder(path: Path, steps: int) -> tuple[Path, str]:
    """The run folder to continue in, and a note. Resuming an older file than checkpoint.pt keeps copies of what came after it."""
    folder = path if path.is_dir() else path.parent
    if not (folder / "args.json").exists():
        raise ValueError(f"{folder} is not a run folder (it has no args.json); put the checkpoint into one")
    newest = folder / "checkpoint.pt"
    if not newest.exists() or find_checkpoint(path).resolve() == newest.resolve():
        return folder, ""
    try:
        later = load_checkpoint(newest, None)["run"]["steps"]
    except ValueError:
        later = "unreadable"
    if later != "unreadable" and later <= steps:
        return folder, ""
    suffixes = (f"-{later}-{n}" if n > 1 else f"-{later}" for n in itertools.count(1))
    suffix = next(s for s in suffixes if not (folder / f"checkpoint{s}.pt").exists())
    try:
        for file in ("metrics.csv", "best.pt", "checkpoint.pt"):
            if (folder / file).exists():
                shutil.copy(folder / file, folder / f"{suffix}.".join(file.split(".")))
    except OSError as error:
        raise ValueError(
            f"cannot keep copies of the later files in {folder} ({error.strerror}); free disk space"
        ) from error
    return folder, f"; later files are kept as *{suffix}.*"


def provenance() -> dict:
    """What made a run: command, commit, versions, number of processes."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    versions |= {"gymnasium": gymnasium.__version__, "system": platform.platform()}
    commit = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        here = Path(__file__).resolve()
        # Installed into a venv inside another repository, this file is not tracked there: then that commit is not ours.
        for git in (["ls-files", "--error-unmatch", here.name], ["describe", "--always", "--dirty", "--abbrev=40"]):
            command = ["git", *git]
            done = subprocess.run(command, cwd=here.parent, capture_output=True, text=True, timeout=5, check=True)
        commit = done.stdout.strip() or None
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {"command": command, "commit": commit, "versions": versions, "processes": world_size()}
