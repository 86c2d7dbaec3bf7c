"""Small helpers for checking what users and servers send."""

from __future__ import annotations

import numpy as np


def is_finite(value) -> bool:
    """Whether this is a number that a float can hold. (Not True or False, and not an integer of 400 digits.)"""
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and abs(value) < 1.79e308


def excerpt(value, length: int = 80) -> str:
    """The beginning of any value, for a message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= length else text[:length] + "..."
