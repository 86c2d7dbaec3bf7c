"""The command line of a trainer: flags, the presets they bring, what to do with a trained driver, exit codes.

`read_command` gives the settings (the trainer's `Args`) and the task (`Task`). Types of Args fields, such as `Count` and
`Fraction`, carry the range of their values.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import signal
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from racer.game.bridge import BridgeError
from racer.game.checks import is_finite
from racer.game.launcher import GAME_ASSETS, check_folder, end_bridges, start_bridges
from racer.game.rules import STARTS
from racer.game.tracks import track_name
from racer.training.checkpoints import load_checkpoint, network_settings, plain, saved_args
from racer.training.processes import (
    ProcessError, SharedError, broadcast_from_rank0, exit_process, init_processes, rank, remembered,
)  # fmt: skip
from racer.training.terminal import warn

EXIT_ERROR, EXIT_USAGE, EXIT_BRIDGE, EXIT_PROCESS, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 3, 4, 130, 143
EXIT_CODES = {  # by what ended the command
    BridgeError: EXIT_BRIDGE, ProcessError: EXIT_PROCESS, FloatingPointError: EXIT_ERROR, ValueError: EXIT_USAGE,
    OSError: EXIT_USAGE, KeyboardInterrupt: EXIT_INTERRUPTED,
}  # fmt: skip
# Exits that all processes of a run take together.
COLLECTIVE_EXIT_CODES = (0, EXIT_BRIDGE, EXIT_INTERRUPTED, EXIT_TERMINATED)

# == Types of settings =================================================================================================


class Range(NamedTuple):
    """The values that a setting may have."""

    low: float
    high: float = float("inf")
    exclusive: bool = False  # of low

    def fits(self, value, kind: type) -> bool:
        if value is None:
            return kind not in (int, float)  # float | None
        whole = kind is not int or (is_finite(value) and value == int(value))
        inside = is_finite(value) and self.low <= value <= self.high
        return inside and whole and not (self.exclusive and value == self.low)

    def __str__(self) -> str:
        low = f"more than {self.low:g}" if self.exclusive else f"{self.low:g} or more"
        return low if self.high == float("inf") else f"from {self.low:g} to {self.high:g}"


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

    def __post_init__(self):
        for name, kind in typing.get_type_hints(type(self), include_extras=True).items():
            value, kinds = getattr(self, name), (kind, *typing.get_args(kind))
            if isinstance(value, str) and kind == tuple[str, ...]:
                setattr(self, name, (value,))
            elif isinstance(value, str) and Path in kinds:
                setattr(self, name, Path(value))
            for allowed in kinds[1:]:
                if isinstance(allowed, Range) and not allowed.fits(value, kinds[1]):
                    raise ValueError(f"--{name.replace('_', '-')} is {value!r}; it must be {allowed}")
        if self.start not in STARTS:
            raise ValueError(f"--start is {self.start!r}; it must be {' or '.join(STARTS)}")
        if self.game and self.bridge_url:
            raise ValueError("--game and --bridge-url are mutually exclusive")
        if self.random_tracks and tuple(self.track_id) != type(self).track_id:
            raise ValueError("--random-tracks and --track-id are mutually exclusive")
        several = len(self.tracks) > 1
        if not self.tracks or (several and len({track_name(track) for track in self.tracks}) < len(self.tracks)):
            raise ValueError(f"--track-id is {' '.join(self.tracks)}; give one track, or several with different names")

    @property
    def tracks(self) -> tuple[str, ...]:
        """The ids of the tracks to drive on. A file is named by its full path, as in a run that is resumed."""
        return tuple(f"random-{n}" for n in range(1, self.random_tracks + 1)) or tuple(map(plain, self.track_id))

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the bridges to the real game, if cars drive there. Those of --game are started when this is first read."""
        return start_bridges(self.game, min(self.bridges, self.num_envs)) if self.game else tuple(self.bridge_url)


# == Flags =============================================================================================================


@dataclasses.dataclass
class Task:
    """What to do with a trained driver instead of training, and defaults for slow games."""

    evaluate: Path | None = None
    """evaluate this checkpoint (or a run folder's best.pt) with deterministic actions"""
    episodes: Count = 10
    """with --evaluate and --start anywhere, or in the game: episodes per track (from the grid all are the same)"""
    json: Path | None = None
    """with --evaluate: also write the results to this file"""
    telemetry: Path | None = None
    """with --evaluate: also write every lap, tick by tick, to this CSV file"""
    export: Path | None = None
    """write the driver of --checkpoint to this folder, as the browser game loads it (ONNX); with --game and no folder, into the
    game"""
    checkpoint: Path | None = None
    """with --export: the checkpoint or run folder"""
    slow_game: bool = False
    """use the defaults of --game on the embedded engine, to try them without the game"""


INTO_THE_GAME = "the game's folder"  # --export without a folder


class Preset(NamedTuple):
    """Defaults that other flags bring."""

    flag: str  # which flag, for readers
    applies: Callable[[argparse.Namespace], object]  # whether it is on the command line
    values: dict


def peek_args(argv: list[str]) -> argparse.Namespace:
    """The flags that decide which defaults the others have. ValueError for flags that exclude or need each other."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("start-from", "resume", "evaluate", "json", "telemetry", "checkpoint", "game"):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}")
    for name in ("track-id", "bridge-url"):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", nargs="*", default=None)
    parser.add_argument("--export", nargs="?", const=INTO_THE_GAME)
    parser.add_argument("--random-tracks", "--random_tracks", type=int, default=0)
    parser.add_argument("--slow-game", "--slow_game", action=argparse.BooleanOptionalAction)
    try:
        given = parser.parse_known_args(argv)[0]
    except argparse.ArgumentError:  # a flag without its value: tyro says so
        return parser.parse_known_args([])[0]
    tasks = [f"--{n.replace('_', '-')}" for n in ("start_from", "resume", "evaluate", "export") if getattr(given, n)]
    if len(tasks) > 1:
        raise ValueError(f"{' and '.join(tasks)} are mutually exclusive")
    if given.slow_game and (given.resume or given.evaluate or given.export):
        raise ValueError(f"--slow-game brings defaults for a new run; leave it out with {tasks[0]}")
    needs = {"export": "checkpoint", "checkpoint": "export", "json": "evaluate", "telemetry": "evaluate"}
    for flag, other in needs.items():
        if getattr(given, flag) and not getattr(given, other):
            raise ValueError(f"--{flag} needs --{other} as well")
    if given.random_tracks and given.track_id:
        raise ValueError("--random-tracks and --track-id are mutually exclusive")
    if given.bridge_url == [] and not given.resume:
        raise ValueError("--bridge-url has no URL; give one like ws://localhost:9876, or leave the flag out")
    return given


def read_command(algorithm: str, Args, Agent, presets: tuple[Preset, ...], doc: str, argv: list[str] | None = None):
    """The command line. -> Args, Task

    Defaults are those of Args and of the presets that apply; with --resume, --evaluate and --export those of the checkpoint.
    """
    argv = sys.argv[1:] if argv is None else argv
    saved = remembered("saved")
    if saved and Path(saved, "checkpoint.pt").exists():  # torchrun has restarted the processes
        argv = ["--resume", saved]
    given = peek_args(argv)
    if given.export and given.game:
        check_folder(Path(given.game))
        if given.export == INTO_THE_GAME:  # no folder: where the game loads its driver from
            argv = [*(word for word in argv if word != "--export"), "--export", str(Path(given.game) / GAME_ASSETS)]
    if path := given.resume or given.evaluate or given.checkpoint:
        prefer = "checkpoint.pt" if given.resume else "best.pt"
        defaults = saved_args(Args, broadcast_from_rank0(load_checkpoint, path, algorithm, prefer)["args"])
        new = {"start": "grid", "bridge_url": (), "game": None, "start_from": None, "resume": None}
        changes = {} if given.resume else new
        changes |= {"game": None} if given.bridge_url is not None else {}
        if given.game:
            changes |= {"bridge_url": (), **next(preset.values for preset in presets if preset.flag == "--game")}
        if given.resume and given.track_id and tuple(given.track_id) != defaults.tracks:
            raise ValueError(f"--track-id cannot change: the run to resume has {' '.join(defaults.tracks[:3])}")
        if given.track_id and not given.resume:
            changes["random_tracks"] = 0
        if given.random_tracks and not given.resume:
            changes["track_id"] = Args.track_id
    else:
        defaults, changes = Args(), {}
        for preset in presets:
            changes |= preset.values if preset.applies(given) else {}
        if given.start_from:  # networks of the same shape
            saved = broadcast_from_rank0(load_checkpoint, given.start_from, algorithm, "best.pt")["args"]
            changes |= {name: saved[name] for name in network_settings(Agent) if name in saved}
    Command = dataclasses.make_dataclass("Command", [("args", Args), ("task", Task)])
    default = Command(dataclasses.replace(defaults, **changes), Task())
    usage = "\n\n".join(doc.split("\n\n")[:2])
    command = tyro.cli(tyro.conf.OmitArgPrefixes[Command], args=argv, default=default, description=usage)
    return command.args, command.task


# == Exit codes ========================================================================================================


def exits_with_code(main: Callable) -> Callable[[], int]:
    """Make a command of `main`: an error becomes one message without a traceback, and the result an exit code."""

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
        except SharedError as shared:
            error = shared.error
            if rank() == 0:
                warn(f"\n{program}: {error}")
        except KeyboardInterrupt as interrupt:
            error = interrupt
            warn(f"\n{program}: stopped at once; --resume continues from the last checkpoint, if there is one")
        except tuple(EXIT_CODES) as expected:
            error = expected
            warn(f"\n{program}: {error}")
        finally:
            end_bridges()
        return next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))

    return command


def exit_code(result) -> int:
    """Of what `train` returned, or of a task."""
    if not isinstance(result, dict) or (result["saved"] and result["finished"]):
        return 0
    if not result["saved"]:
        return EXIT_ERROR
    return EXIT_TERMINATED if result["signal"] == signal.SIGTERM else EXIT_INTERRUPTED


def run_as_script(main: Callable[[], int]) -> None:
    """Call `main` and end the process."""
    code = main()
    exit_process(code, wait_for_others=code in COLLECTIVE_EXIT_CODES)
