"""Random numbers that are the same on every machine: splitmix64, with a stream per car."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from racer.game.checks import UserError, excerpt

STEP = 0x9E3779B97F4A7C15  # between two states of a stream


def scramble(z):
    """splitmix64's output function, a bijection on uint64 without visible structure."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def first_state(seed: int) -> np.int64:
    """The state a stream starts from. Scrambled, so that neighbouring seeds give distant streams."""
    return scramble(np.array([int(seed) % 2**64], np.uint64)).view(np.int64)[0]


def uniform(state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The next numbers in [0, 1) of streams (n,), and their new states. States are uint64 kept as int64, which torch can save."""
    state = state.view(np.uint64) + np.uint64(STEP)
    return (scramble(state) >> np.uint64(11)) / 2.0**53, state.view(np.int64)


def car_seeds(seed: int, cars) -> list[int]:
    """A seed for each car (by its number in the fleet). No two pairs of seed and car share one, in practice."""
    base = scramble(np.array([int(seed) % 2**64], np.uint64))
    return [int(s) for s in scramble(base + np.uint64(STEP) * np.asarray(cars, np.uint64))]


def fleet_seeds(seed, num_cars: int, first_car: int = 0, first_reset: bool = False) -> list[int | None] | None:
    """A seed per car, from a number or a list of them. None continues a car's stream (a fresh one on the first reset)."""
    if seed is None and not first_reset:
        return None
    if seed is None or (isinstance(seed, (int, np.integer)) and seed >= 0):
        seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        return car_seeds(seed, first_car + np.arange(num_cars))
    fits = isinstance(seed, Sequence) and len(seed) == num_cars
    if not fits or any(s is not None and (not isinstance(s, int) or s < 0) for s in seed):
        raise UserError(f"seed is {excerpt(seed)}; it must be 0 or more, or a list of {num_cars}, None for any")
    fresh = np.random.SeedSequence().generate_state(num_cars) if first_reset else [None] * num_cars
    return [other if s is None else s for s, other in zip(seed, fresh, strict=True)]
