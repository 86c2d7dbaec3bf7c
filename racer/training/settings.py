"""Settings of a trainer: the types of its flags, the presets, the command line.

Types of Args fields, such as `Count` and `Fraction`, carry the range of their values. `parse_args` makes Args from a command
line, `as_command` a program of a function: one line and an exit code for what a user can cure, a traceback for what is a defect.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import math
import os
import shlex
import signal
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro

from racer.game.bridge import BridgeError
from racer.game.checks import UserError, is_finite, quote
from racer.game.rules import STARTS
from racer.training.checkpoints import args_from_json, flag_of, full_path, load_checkpoint, network_settings
from racer.training.processes import (
    ProcessError, SharedError, broadcast_from_rank0, exit_process, init_processes, rank, remembered, world_size,
)  # fmt: skip
from racer.training.terminal import TrainingDiverged, is_trainer, print_safely, set_program, warn

EXIT_ERROR, EXIT_USAGE, EXIT_BRIDGE, EXIT_PROCESS, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 3, 4, 130, 143
EXIT_CODES = {  # by what ended the command
    BridgeError: EXIT_BRIDGE, ProcessError: EXIT_PROCESS, TrainingDiverged: EXIT_ERROR, UserError: EXIT_USAGE,
}  # fmt: skip
# Exits that all processes of a run take together.
COLLECTIVE_EXIT_CODES = (0, EXIT_BRIDGE, EXIT_INTERRUPTED, EXIT_TERMINATED)
ENGINE = ("none",)  # --bridge-url none: continue a run of the real game on the embedded engine

# == Types of settings =================================================================================================


class Range(NamedTuple):
    """The values that a setting may have."""

    low: float
    high: float = math.inf
    exclusive: bool = False  # of low

    def fits(self, value, kind: type) -> bool:
        if value is None:
            return kind not in (int, float)  # float | None
        whole = kind is not int or (is_finite(value) and value == int(value))
        inside = is_finite(value) and self.low <= value <= self.high
        return inside and whole and not (self.exclusive and value == self.low)

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "a finite number"
        low = f"more than {self.low:g}" if self.exclusive else f"{self.low:g} or more"
        return low if self.high == math.inf else f"from {self.low:g} to {self.high:g}"


def _count(words: list[str]) -> int:
    value = float(words[0].replace("_", ""))
    if not 1 <= value < 2**53 or value != int(value):
        raise ValueError(f"{words[0]} is not an integer, 1 or more, like 2000000, 2_000_000 or 2e6")
    return int(value)


Count = Annotated[  # a number of steps, cars or the like
    int,
    Range(1),
    tyro.constructors.PrimitiveConstructorSpec(
        1, "N", _count, is_instance=lambda value: isinstance(value, int), str_from_instance=lambda value: [str(value)]
    ),
]
Whole = Annotated[int, Range(0, 2**53)]
Fraction = Annotated[float, Range(0, 1)]
Positive = Annotated[float, Range(0, exclusive=True)]
NonNegative = Annotated[float, Range(0)]


class Settings:
    """Base of a trainer's Args: checks its values, also of Args made in Python, and names the flag that is wrong."""

    random_tracks = 0  # a flag of PPO

    def __post_init__(self):
        for name, kind in typing.get_type_hints(type(self), include_extras=True).items():
            kinds = (kind, *typing.get_args(kind))
            setattr(self, name, plain_value(getattr(self, name), kinds))
            for allowed in kinds[1:]:
                if isinstance(allowed, Range):
                    fits = allowed.fits(getattr(self, name), kinds[1])
                    self.require(fits, f"{flag_of(name)} is {getattr(self, name)!r}; it must be {allowed}")
        self.require(self.start in STARTS, f"--start is {self.start!r}; it must be {' or '.join(STARTS)}")
        self.require(not (self.game and self.bridge_url), "--game and --bridge-url are mutually exclusive")
        self.require(self.track_id is not None and self.bridge_url is not None, "--track-id and --bridge-url cannot be None")
        alone = not self.random_tracks or tuple(self.track_id) == type(self).track_id
        self.require(alone, "--random-tracks and --track-id are mutually exclusive")
        self.require(self.tracks, "--track-id has no track; give one, or several to train one driver for all")

    @staticmethod
    def require(fits, otherwise: str) -> None:
        """UserError with this message unless it fits."""
        if not fits:
            raise UserError(otherwise)

    @property
    def tracks(self) -> tuple[str, ...]:
        """The ids of the tracks to drive on. A file is named by its full path, as in a run that is resumed."""
        return tuple(f"any-{n}" for n in range(1, self.random_tracks + 1)) or tuple(map(full_path, self.track_id))


def plain_value(value, kinds: tuple):
    """What Python code may give for a setting as what a command line gives: NumPy numbers, paths as text, 24.0 for 24."""
    if isinstance(value, np.generic):
        value = value.item()
    if tuple[str, ...] in kinds and value is not None:
        return tuple(map(str, (value,) if isinstance(value, (str, Path)) else value))
    if Path in kinds and isinstance(value, str):
        return Path(value)
    if int in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


# == The command line ==================================================================================================


class Preset(NamedTuple):
    """Defaults that some flags set."""

    flag: str  # which flags, for people
    applies: Callable[[types.SimpleNamespace], object]  # to the flags of a command line, before any preset
    values: dict


def parse_args(algorithm: str, Args, Agent, presets: tuple[Preset, ...], doc: str, line: str | None):
    """A command line as Args: that of this program, or `line`.

    Defaults are those of Args and of the presets that apply, which are printed; with --resume those of the checkpoint, and with
    --start-from those that shape its networks.
    """
    if line is None:
        set_program(sys.argv[0])
    words = sys.argv[1:] if line is None else split_words(line)
    refuse_moved(words)
    saved = remembered("saved")
    if saved and Path(saved, "checkpoint.pt").exists():  # torchrun has restarted the processes
        words = ["--resume", saved]
    given = types.SimpleNamespace(**_parse(Args, {}, [word for word in words if word not in ("-h", "--help")], doc))
    if sum(bool(value) for value in (given.start_from, given.resume, given.slow_game and given.resume)) > 1:
        both = "--slow-game" if given.slow_game else "--start-from"
        raise UserError(f"{both} is for a new run; leave it out with --resume")
    if not given.bridge_url and {"--bridge-url", "--bridge_url"} & set(words):
        raise UserError("--bridge-url has no URL; give one like ws://localhost:9876, or none for the embedded engine")
    if given.bridge_url == ENGINE and not given.resume:
        given.bridge_url = ()
    if given.resume:
        defaults = _defaults_on_resume(algorithm, Args, presets, given)
    else:
        applied = [preset for preset in presets if preset.applies(given)]
        defaults = functools.reduce(dict.__or__, (preset.values for preset in applied), {})
        if given.start_from:  # networks of the same shape
            settings = broadcast_from_rank0(load_checkpoint, given.start_from, algorithm, "best.pt")["args"]
            defaults |= {name: settings[name] for name in network_settings(Agent) if name in settings}
    values = _parse(Args, defaults, words, _about(doc, presets))
    del values["slow_game"]
    if values["bridge_url"] == ENGINE:
        values["bridge_url"] = ()
    if not given.resume and rank() == 0:
        for preset in applied:
            print_safely(_show_preset(preset.flag, {k: v for k, v in preset.values.items() if values[k] == v}))
    return Args(**values)


def _defaults_on_resume(algorithm: str, Args, presets, given) -> dict:
    """The settings that the run began with. Only where the real game is may be another one."""
    saved = args_from_json(Args, broadcast_from_rank0(load_checkpoint, given.resume, algorithm)["args"])
    defaults = {field.name: getattr(saved, field.name) for field in dataclasses.fields(Args)} | {"resume": None}
    if given.bridge_url:
        defaults |= {"game": None}
    if given.game:
        defaults |= {"bridge_url": ()} | next(preset.values for preset in presets if preset.flag == "--game")
    if given.track_id != Args.track_id and not getattr(given, "random_tracks", 0):
        defaults |= {"random_tracks": 0}
    return defaults


def split_words(line: str) -> list[str]:
    """A command line in words. On Windows a backslash separates folders, and quotes nothing."""
    try:
        words = shlex.split(line, posix=os.name != "nt")
    except ValueError as error:
        raise UserError(f"{line!r} is not a command line: {error}") from error
    return [word.strip('"') for word in words] if os.name == "nt" else words


def refuse_moved(words: list[str]) -> None:
    """Flags of earlier versions that are commands now."""

    def value_of(flag: str, default: str) -> str:
        for word, following in zip(words, [*words[1:], "--"], strict=True):
            name, _, value = word.partition("=")
            if name == flag and (value or not following.startswith("--")):
                return quote(value or following)
        return default

    names = {word.partition("=")[0] for word in words}
    if "--evaluate" in names:
        raise UserError(f"--evaluate is a command of its own: python -m racer.evaluate {value_of('--evaluate', 'runs/NAME')}")
    if "--export" in names:
        where = f"--game {value_of('--game', 'GAME')}" if "--game" in names else f"--out {value_of('--export', 'FOLDER')}"
        command = f"python -m racer.export {value_of('--checkpoint', 'runs/NAME')} {where}"
        raise UserError(f"--export is a command of its own: {command}")


def show_flags(values: dict) -> str:
    """Settings as they are typed."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag_of(name) if value else flag_of(f"no_{name}"))
        else:
            words += [flag_of(name), *map(str, value if isinstance(value, tuple) else (value,))]
    return " ".join(words)


def _about(doc: str, presets) -> str:
    """What --help says first: the examples of the trainer's docstring, and the presets."""
    lines = [textwrap.indent(_show_preset(preset.flag, preset.values), "    ") for preset in presets]
    return "\n\n".join([*doc.split("\n\n")[:2], "Presets, defaults that these flags set:", "\n".join(lines)])


def _show_preset(flag: str, values: dict) -> str:
    return textwrap.fill(f"{flag} sets {show_flags(values)}", 96, subsequent_indent="    ", break_on_hyphens=False)


def _parse(Args, defaults: dict, words: list[str], doc: str) -> dict:
    """The flags of a command line by name, as tyro reads them, in the groups that Args has."""
    kinds, groups = typing.get_type_hints(Args, include_extras=True), {}
    about = documented_fields(Args)
    for field in dataclasses.fields(Args):
        group, text = about.get(field.name, ("other", ""))
        kind = Annotated[kinds[field.name], tyro.conf.arg(help=text)]
        own = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = defaults.get(field.name, own)
        groups.setdefault(group, []).append((field.name, kind, dataclasses.field(default_factory=lambda value=value: value)))
    text = "use the defaults of --game on the embedded engine, to try them without the game"
    slow_game = ("slow_game", Annotated[bool, tyro.conf.arg(help=text)], dataclasses.field(default=False))
    next(iter(groups.values())).append(slow_game)
    parts = [(name, dataclasses.make_dataclass(name, fields)) for name, fields in groups.items()]
    Command = dataclasses.make_dataclass("Command", parts)
    default = Command(*(part() for _, part in parts))
    command = tyro.cli(tyro.conf.OmitArgPrefixes[Command], args=words, default=default, description=doc)
    return {name: value for group, _ in parts for name, value in vars(getattr(command, group)).items()}


def documented_fields(Args) -> dict[str, tuple[str, str]]:
    """Of every field: the heading (`# -- name`) that it stands under in the source, and its docstring."""
    found = {}
    for cls in reversed(Args.__mro__[:-1]):
        with contextlib.suppress(OSError, TypeError):  # typed into an interpreter
            source = textwrap.dedent(inspect.getsource(cls))
            body = ast.parse(source).body[0].body
            heads = [(n, line.strip()[5:]) for n, line in enumerate(source.split("\n"), 1) if line.strip().startswith("# -- ")]
            for field, following in zip(body, [*body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign):
                    group = next((head for n, head in reversed(heads) if n < field.lineno), "other").replace(" ", "_")
                    text = getattr(getattr(following, "value", None), "value", "")
                    found[field.target.id] = group, " ".join(text.split()) if isinstance(text, str) else ""
    return found


# == Commands ==========================================================================================================


def as_command(main: Callable) -> Callable[[], int]:
    """Make a program of `main`: what a user can cure becomes one message without a traceback, and the result an exit code."""

    @functools.wraps(main)
    def command() -> int:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # for terminals that lack a letter
        program = Path(sys.argv[0]).name
        try:
            init_processes()
            return exit_code(main())
        except SystemExit as end:  # --help, or a flag that tyro refuses
            return int(end.code or 0)
        except KeyboardInterrupt:
            trains = "; --resume continues from the last checkpoint, if there is one" if is_trainer() else ""
            warn(f"\n{program}: stopped at once{trains}")
            return EXIT_INTERRUPTED
        except (SharedError, *EXIT_CODES) as error:
            cause = error.error if isinstance(error, SharedError) else error
            code = next((code for kind, code in EXIT_CODES.items() if isinstance(cause, kind)), None)
            if code is None:
                raise
            if rank() == 0 or cause is error:
                warn(f"\n{program}: {cause}")
            return code

    return command


def exit_code(result) -> int:
    """Of what `train` returned, or of another command."""
    if not isinstance(result, dict) or (result["saved"] and result["finished"]):
        return 0
    if not result["saved"]:
        return EXIT_ERROR
    return EXIT_TERMINATED if result["signal"] == signal.SIGTERM else EXIT_INTERRUPTED


def run_as_script(main: Callable[[], int]) -> None:
    """Call `main` and end the process."""
    try:
        code = main()
    except Exception:
        if world_size() == 1:
            raise
        traceback.print_exc()
        code = EXIT_ERROR
    exit_process(code, wait_for_others=code in COLLECTIVE_EXIT_CODES)
