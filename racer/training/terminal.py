"""What a run shows in the terminal: text, a progress line, where the time goes, and what to type next."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

from racer.game.checks import quote

WIDEST = 100  # columns
_program: str | None = None  # what the command line began with; None: called from Python code


class TrainingDiverged(FloatingPointError):
    """A value that has become NaN or infinite."""


def print_safely(text: str, end: str = "\n", to: str = "stdout") -> None:
    """Print. If that fails (`| head` has ended, the disk under a log is full), stay silent: it must not end the run."""
    # ValueError: the stream is closed. RuntimeError: a signal arrived during a print.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        print(text, end=end, file=getattr(sys, to), flush=True)


def warn(text: str) -> None:
    print_safely(text, to="stderr")


def set_program(name: str) -> None:
    """This process runs the command line of a trainer."""
    global _program
    _program = name


def is_trainer() -> bool:
    return _program is not None


def resume_command(folder: Path) -> str:
    """What continues a run: a command line, or Python code where the run was started by such."""
    if _program is None:
        return f'train(read_args("--resume {quote(folder.as_posix())}"))'
    here, world = os.environ.get("LOCAL_WORLD_SIZE"), int(os.environ.get("WORLD_SIZE") or 1)
    if world == 1 or here is None:
        return f"python {quote(_program)} --resume {quote(folder)}"
    machines = f"--nnodes={world // int(here)} " if world > int(here) else ""
    return f"torchrun {machines}--nproc_per_node={here} {quote(_program)} --resume {quote(folder)}"


class Clock:
    """Where the time goes: `with clock("learning"): ...` adds up seconds by name."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str):
        began = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


class ProgressLine:
    """A line that is rewritten in place in a terminal, or a new line every 10 % where the output is a file or a pipe."""

    REFRESH_S = 0.2

    def __init__(self, total: int, first_step: int):
        self.total, self.first_step, self.began = total, first_step, time.perf_counter()
        self.live = sys.stdout is not None and sys.stdout.isatty()
        self._next_line, self._next_refresh = first_step, 0.0

    def show(self, steps: int, status: str) -> None:
        now = time.perf_counter()
        if now < self._next_refresh if self.live else steps < self._next_line:
            return
        self._next_refresh, self._next_line = now + self.REFRESH_S, steps + self.total // 10
        rate = (steps - self.first_step) / max(now - self.began, 1e-9)
        left = round(max(self.total - steps, 0) / max(rate, 1e-9))
        text = f"{steps:>11,}  {min(steps / self.total, 1):4.0%}  {left // 60:3}:{left % 60:02} left  {rate:>9,.0f} steps/s"
        self.print(f"{text}  {status}", end="" if self.live else "\n")

    def print(self, text: str, end: str = "\n") -> None:
        """A line of its own, unless `end` is empty: then it is overwritten by the next one. Cut at a word, if it is too long."""
        width = min(shutil.get_terminal_size().columns - 1, WIDEST)
        if not end and len(text) > width:
            text = text[: width + 1].rsplit(" ", 1)[0]
        print_safely(f"\r{text:<{width}}" if self.live else text, end)
