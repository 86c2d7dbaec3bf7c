"""Small helpers for checking what users and servers send."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
from pathlib import Path

import numpy as np


class UserError(ValueError):
    """Something that a user gave cannot work. Commands show it as one line; any other error is a defect, with its traceback."""


def is_finite(value) -> bool:
    """Whether this is a number that a float can hold. (Not True or False, and not an integer of 400 digits.)"""
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and abs(value) < 1.79e308


def excerpt(value, length: int = 80) -> str:
    """The beginning of any value, for a message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= length else text[:length] + "..."


def quote(path) -> str:
    """A path as it is typed in this system's shell."""
    return subprocess.list2cmdline([str(path)]) if os.name == "nt" else shlex.quote(str(path))


@contextlib.contextmanager
def writing(file: Path):
    """Around writing a file that a user named: what is wrong is one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}") from error


def read_json(path: Path, what: str):
    """The contents of a user's JSON file. UserError that names it if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))  # Windows' Notepad begins a file with a byte order mark
    except OSError as error:
        raise UserError(f"{what} {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} {path} is not JSON: {error}") from error
