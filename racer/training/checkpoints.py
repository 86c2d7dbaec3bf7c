"""Checkpoints and run folders: one file holds everything that a run needs to continue, and here it is written and read.

A checkpoint is a dict of tensors and plain values, so that loading it runs no code:

    algorithm, trainer, format     which trainer wrote it, from which file, in which version of this form
    args                the settings, as plain values
    config              reward weights and limits
    parts               the state of every component of the run, by name (see below)
    run                 how far the run is and its best driver so far

A component is any object with one of these pairs of methods:

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
import errno
import functools
import importlib
import importlib.util
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
from collections.abc import Sequence
from pathlib import Path

import gymnasium
import numpy as np
import torch

from racer.game.checks import UserError
from racer.game.rewards import REWARD_TERMS
from racer.game.tracks import track_name
from racer.training.processes import gather_on_rank0, rank, remember, remembered, world_size
from racer.training.terminal import quote, warn

CHECKPOINT_FORMAT = 4
ALGORITHMS = ("ppo", "sac")
CHANGEABLE_ON_RESUME = (
    *("total_timesteps", "game", "bridges", "bridge_url", "bridge_retries", "resume"),
    *("eval_every", "checkpoint_every", "tensorboard", "pictures", "wandb", "save_buffer"),
    *("track_id", "config_path"),  # the paths of files: what is in them is compared
)
NOT_DRIVING = ("critic", "log_alpha", "log_std")  # beginnings of names of weights that a driver does not need

# == Files =============================================================================================================


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


def find_checkpoint(path: str | Path, prefer: str = "checkpoint.pt") -> Path:
    """A checkpoint's file, given itself or its run folder."""
    path = Path(path)
    if path.is_dir():
        there = [path / name for name in (prefer, "checkpoint.pt", "best.pt") if (path / name).exists()]
        if not there and (path / "args.json").exists():
            raise UserError(f"{path} was stopped before its first checkpoint; start again with another --run-name")
        if not there:
            raise UserError(f"{path} has no checkpoint; give a run folder or a checkpoint (.pt)")
        path = there[0]
    if not path.exists():
        raise UserError(f"{path} does not exist; give a run folder or a checkpoint (.pt)")
    return path


def load_checkpoint(path: str | Path, algorithm: str | None, prefer: str = "checkpoint.pt") -> dict:
    """A checkpoint from a file or a run folder. UserError unless it is valid and of this algorithm (None: of either)."""
    path = find_checkpoint(path, prefer)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except Exception as error:  # torch raises many kinds: truncated, not a checkpoint, a pickle with code in it
        code = str(error).startswith("Weights only")
        reason = "it contains objects other than tensors" if code else "truncated, or not written by torch.save"
        other = "checkpoint.pt" if "best" in path.name else "best.pt"
        found = f"{path} is not a valid checkpoint ({reason})"
        raise UserError(f"{found}. No code in it was run. Try another file, e.g. {other} beside it") from error
    found = checkpoint.get("algorithm") if isinstance(checkpoint, dict) else None
    if found is None:
        raise UserError(f"{path} is a torch file, but not a checkpoint")
    if found not in (ALGORITHMS if algorithm is None else (algorithm,)):
        known = " or ".join(f"{name}_racer.py" for name in (ALGORITHMS if algorithm is None else (algorithm,)))
        raise UserError(f"{path} is a checkpoint of {found}_racer.py, not of {known}")
    if checkpoint.get("format") != CHECKPOINT_FORMAT or not {"args", "parts", "config", "run"} <= set(checkpoint):
        found = f"{path} has format {checkpoint.get('format')}, this program reads {CHECKPOINT_FORMAT}"
        raise UserError(f"{found}: another version wrote it. Use that version, or retrain")
    if "progress" not in (args := checkpoint["args"]):  # before 1.1.0
        tracks = [f"random-{n}" for n in range(1, args.pop("random_tracks", 0) + 1)]
        args |= {"progress": "centreline", **({"track_id": tracks} if tracks else {})}
    return checkpoint


def to_tensors(value):
    """NumPy arrays as tensors, through dicts and lists."""
    if isinstance(value, dict):
        return {key: to_tensors(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_tensors(item) for item in value]
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def to_numpy_like(saved, own):
    """A component's saved state: tensors back to NumPy arrays where the component uses arrays."""
    if not isinstance(own, dict):  # the state of a torch.Generator is a tensor
        return saved
    return {key: item.numpy() if isinstance(own.get(key), np.ndarray) else item for key, item in saved.items()}


@contextlib.contextmanager
def mismatch_as_error(checkpoint: dict, hint: str = ""):
    """Around restoring components: one that does not fit becomes a UserError."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        made_by = checkpoint.get("trainer", f"{checkpoint['algorithm']}_racer.py")
        found = f"the checkpoint, which {made_by} wrote, does not fit this program or its settings: {reason}"
        raise UserError(f"{found}{hint}") from error


# == Components ========================================================================================================


def save_components(components: dict, unsaved: tuple[str, ...] = ()) -> dict:
    """The states of all components, of all processes. (Every process has to call this.)"""
    return {
        name: part.state_dict() if hasattr(part, "state_dict") else gather_on_rank0(part.get_state())
        for name, part in components.items()
        if name not in unsaved
    }


def restore_components(components: dict, saved: dict) -> tuple[bool, list[str]]:
    """Continue from saved states. -> whether the cars ("envs") continue where they were, and what is not as before"""
    notes, processes = [], len(saved["stats"])
    same_processes = processes == world_size()
    # The real game has no state.
    cars_continue = bool(same_processes and saved["envs"][0] and components["envs"].get_state())
    for name, part in components.items():
        if name not in saved:
            notes.append(f"the checkpoint has no {name}: it starts empty, and the run is not bit-exact")
        elif hasattr(part, "load_state_dict"):
            part.load_state_dict(saved[name])
        elif cars_continue or (same_processes and name != "envs"):
            part.set_state(to_numpy_like(saved[name][rank()], part.get_state()))
        elif hasattr(part, "merge_states"):
            part.merge_states([to_numpy_like(state, part.get_state()) for state in saved[name]])
    if not same_processes:
        change = f"{world_size()} instead of {processes} processes"
        notes.append(f"resuming with {change}: all cars begin new episodes, and the run is not bit-exact")
    elif not cars_continue:
        notes.append("all cars begin new episodes, since the state of the real game cannot be saved")
    return cars_continue, notes


def check_resumed(checkpoint: dict, args, config: dict) -> None:
    """UserError if the settings are not those that the run began with."""
    before, now = args_to_json(type(args)()) | checkpoint["args"], args_to_json(args)
    for field in dataclasses.fields(args):
        old, new = before.get(field.name), now.get(field.name)
        if new != old and field.name not in CHANGEABLE_ON_RESUME:
            raise UserError(f"{flag_of(field.name)} is {new}, but the run to resume has {old}, and that cannot change")
    old, new = (settings.get("track_id") or () for settings in (before, now))
    # A file may have moved; if its contents changed, the cars' states do not fit.
    files = len(old) == len(new) and all(str(track).lower().endswith(".json") for track in (*old, *new))
    if old != new and not files:
        raise UserError(f"--track-id cannot change: the run to resume has {' '.join(old[:3])}")
    if checkpoint["config"] != config:
        raise UserError(
            f"the rewards or limits in {args.config_path or 'ai-config.json'} are not those that the run began with "
            f"({json.dumps(checkpoint['config'])}); restore them, or start a new run"
        )
    before, now = checkpoint.get("reward_terms", []), sorted(REWARD_TERMS)
    if before != now:
        raise UserError(f"the run has the reward terms {before} (REWARD_TERMS), this program has {now}")


# == Settings as plain values ==========================================================================================


def args_to_json(args) -> dict:
    """Args as plain values for a checkpoint or JSON. Files are stored by their full path, so that a run can resume elsewhere."""
    settings = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if (value is None and field.default is None) or (isinstance(value, Path) and value == field.default):
            continue
        settings[field.name] = [full_path(v) for v in value] if isinstance(value, (tuple, list)) else full_path(value)
    return settings


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def full_path(value):
    """A path, or the name of a track file, as its full path; other values as they are."""
    is_file = isinstance(value, Path) or (isinstance(value, str) and value.lower().endswith(".json"))
    return str(Path(value).resolve()) if is_file else value


def args_from_json(Args, settings: dict):
    """The settings of a checkpoint as Args. A flag that is newer than the checkpoint has its default; one that is gone is named."""
    kinds = typing.get_type_hints(Args)
    if gone := sorted(set(settings) - set(kinds)):
        warn(f"ignoring settings of the checkpoint that this program does not have: {', '.join(gone)}")
    return Args(**{name: _of_kind(value, kinds[name]) for name, value in settings.items() if name in kinds})


def _of_kind(value, kind):
    """A plain value as a field of this type: `Path`, `tuple[...]`, or either of them or None."""
    kinds = (kind, *typing.get_args(kind))
    if isinstance(value, list):
        return tuple(_of_kind(item, kind) for item in value)
    return Path(value) if Path in kinds and isinstance(value, str) else value


def network_settings(Agent) -> list[str]:
    """The flags that shape the networks: what Agent is made from."""
    return list(inspect.signature(Agent.__init__).parameters)[1:]


# == Trained drivers ===================================================================================================


class TrainedDriver:
    """A driver for code of your own: driver(observations) -> actions, of one car (14,) or of many (N, 14).

    `args` are the settings of its training, `steps` how long that was, `config` and `reward_terms` its rewards and limits.
    """

    def __init__(self, agent: torch.nn.Module, args, checkpoint: dict):
        self.agent, self.args, self.steps = agent, args, checkpoint["run"]["steps"]
        self.config, self.reward_terms = checkpoint["config"], checkpoint.get("reward_terms", [])

    def __call__(self, observations) -> np.ndarray:
        observations = np.asarray(observations, np.float32)
        return self.agent.drive(np.atleast_2d(observations)).reshape(*observations.shape[:-1], -1)


def load_driver(path: str | Path, trainer: str | Path | Sequence | None = None) -> TrainedDriver:
    """The driver of a run folder (its best one) or of a checkpoint, of either algorithm.

    trainer: the file that trained it, if that is not ppo_racer.py or sac_racer.py as they are here. It is imported, so its code
    runs; a run folder keeps the file that made it. Of several files, the one of that name is taken.
    """
    file = find_checkpoint(path, prefer="best.pt")
    checkpoint = load_checkpoint(file, None)
    own = f"{checkpoint['algorithm']}_racer.py"
    made_by = checkpoint.get("trainer", own)
    kept = file.parent / made_by
    if isinstance(trainer, (list, tuple)):
        trainer = next((other for other in trainer if Path(other).name == made_by), None)
    hint = f"--trainer {quote(kept)} imports the file that trained it (in Python: load_driver(..., trainer=...))"
    if trainer is None and made_by != own:
        raise UserError(f"{path} was trained by {made_by}, not by {own}: {hint}")
    module = _import_file(trainer) if trainer else importlib.import_module(own.removesuffix(".py"))
    args = args_from_json(module.Args, checkpoint["args"])
    agent, weights = module.make_agent(args), checkpoint["parts"]["agent"]
    needed = [name for name in agent.state_dict() if not name.startswith(NOT_DRIVING)]
    with mismatch_as_error(checkpoint, "" if trainer else f". If {own} has changed since: {hint}"):
        agent.load_state_dict({name: weights[name] for name in needed}, strict=False)
    return TrainedDriver(agent, args, checkpoint)


def _import_file(path: str | Path):
    """A trainer's file as a module."""
    path = Path(path)
    if not path.is_file() or path.suffix != ".py":
        raise UserError(f"--trainer is {path}; give a trainer's .py file")
    spec = importlib.util.spec_from_file_location(f"trainer_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not all(hasattr(module, name) for name in ("Args", "make_agent")):
        raise UserError(f"--trainer is {path}, which has no Args and make_agent as a trainer has")
    return module


# == Run folders =======================================================================================================


def make_run_folder(algorithm: str, args, trainer: Path | None = None) -> Path:
    """runs/NAME with the settings, the versions, the commit and the trainer's source."""
    tracks = "-".join(track_name(track) for track in args.tracks[:3])
    tracks = f"any-1-to-{args.random_tracks}" if args.random_tracks else tracks
    name = args.run_name or f"{algorithm}-{tracks}-s{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    if Path(name).name != name or name == "..":
        raise UserError(f"--run-name is {name!r}, which is a path; give a name, and the folder above it as --run-dir")
    try:
        folder = _new_folder(args.run_dir, name, may_exist=bool(args.run_name))
        (folder / "args.json").write_text(json.dumps({"args": args_to_json(args), **provenance()}, indent=2))
        if trainer:
            shutil.copy(trainer, folder / trainer.name)
    except OSError as error:
        raise UserError(f"cannot write {args.run_dir / name} ({error.strerror}); choose another --run-dir") from error
    remember("folder", str(folder))
    return folder


def _new_folder(parent: Path, name: str, may_exist: bool) -> Path:
    """A folder that no other run has. Two runs may start in the same second."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            own = remembered("folder") == str(folder)  # torchrun has restarted the processes
            if own or (may_exist and folder.is_dir() and not any(folder.iterdir())):
                return folder
            if may_exist:
                resume = f"resume it (--resume {quote(folder)}), or " if (folder / "checkpoint.pt").exists() else ""
                raise UserError(f"{folder} is not empty; {resume}give another --run-name") from None


def source_file(cls: type) -> Path | None:
    """The file that a class stands in. None if it was typed into an interpreter."""
    with contextlib.suppress(TypeError, OSError):
        path = Path(inspect.getsourcefile(cls))
        return path if path.is_file() else None
    return None


def resumed_folder(path: Path) -> Path:
    """The run folder to continue in. An older file than checkpoint.pt is refused: the run has continued past it."""
    folder = path if path.is_dir() else path.parent
    if not (folder / "args.json").exists():
        raise UserError(f"{folder} is not a run folder (it has no args.json); put the checkpoint into one")
    newest, given, later = folder / "checkpoint.pt", find_checkpoint(path), -1
    if newest.exists() and given.resolve() != newest.resolve():
        with contextlib.suppress(UserError):  # a damaged one is replaced
            later = load_checkpoint(newest, None)["run"]["steps"]
    if later >= 0 and later > (steps := load_checkpoint(given, None)["run"]["steps"]):
        found = f"{given} is of step {steps:,}, but the run has reached step {later:,}"
        raise UserError(f"{found}: resume {folder}, or begin a new run from that driver with --start-from {quote(given)}")
    return folder


def lock_folder(folder: Path):
    """Keep other runs out of a run folder as long as the returned file is open. A killed process leaves no lock behind."""
    try:
        file = (folder / "run.lock").open("ab")
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror or error})") from error
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):  # else: a file system without locks
            file.close()
            raise UserError(f"{folder} is in use by another process that trains; stop it, or wait for its end") from error
    return file


def provenance() -> dict:
    """What made a run: command, commit, versions, number of processes."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    versions |= {"gymnasium": gymnasium.__version__, "system": platform.platform()}
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {"command": command, "commit": _commit_of(__file__), "versions": versions, "processes": world_size()}


@functools.lru_cache
def _commit_of(file: str) -> str | None:
    here = Path(file).resolve()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        # Installed into a venv inside another repository, this file is not tracked there: then that commit is not ours.
        for git in (["ls-files", "--error-unmatch", here.name], ["describe", "--always", "--dirty", "--abbrev=40"]):
            command = ["git", *git]
            done = subprocess.run(command, cwd=here.parent, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip() or None
    return None
