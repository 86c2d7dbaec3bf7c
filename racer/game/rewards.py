"""Reward terms of your own, added to the game's six parts, on the embedded engine and in the real game alike.

    import numpy as np
    from racer_env import REWARD_TERMS

    REWARD_TERMS["smooth"] = lambda observations, actions, info: -0.0005 * np.abs(actions[:, 0])

Put such a line into this file, or into your own script or a trainer before training starts. Training, evaluation, `best.pt` and
the `reward/` tags then all use the sum, and `info["smooth"]` holds the term.

A term is a function of what a tick left behind, for N cars at once: observations (N, 14), actions (N, 3) as the game clamps
them, and info, a dict of arrays (N,) with the keys in `STEP_INFO`. It returns an array (N,).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from racer.game.checks import UserError
from racer.game.rules import ACTION_HIGH, ACTION_LOW, STEP_INFO

REWARD_TERMS: dict[str, Callable[[np.ndarray, np.ndarray, dict], np.ndarray]] = {}


def add_reward_terms(observations, actions, rewards, info: dict) -> np.ndarray:
    """The game's rewards (N,) plus all REWARD_TERMS, whose values are put into `info`."""
    if REWARD_TERMS:
        if taken := sorted(set(REWARD_TERMS) & set(STEP_INFO)):
            raise UserError(f"REWARD_TERMS has {taken[0]!r}, which info already holds; choose another name")
        actions = np.clip(actions, ACTION_LOW, ACTION_HIGH)
        terms = {name: term(observations, actions, info) for name, term in REWARD_TERMS.items()}
        for name, values in terms.items():
            info[name] = check_term(name, values, len(rewards))
            rewards = rewards + info[name]
    return rewards


def check_term(name: str, values, num_cars: int) -> np.ndarray:
    """What a reward term returned as an array (N,), or an error that names the term."""
    if np.shape(values) not in ((), (num_cars,)):
        wanted = f"it must return one number per car, shape ({num_cars},)"
        raise UserError(f"reward term {name!r} returned an array of shape {np.shape(values)}; {wanted}")
    values = np.array(np.broadcast_to(values, num_cars), float)
    if not np.isfinite(values).all():
        car = int(np.flatnonzero(~np.isfinite(values))[0])
        raise UserError(f"reward term {name!r} returned {values[car]} for car {car}; rewards must be finite")
    return values
