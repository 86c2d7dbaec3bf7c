"""What a driver sees: one row per observation. Sizes, spaces and the networks' normalisation all follow from this table.

To add an observation, append a row. The embedded engine computes it with `value`. (The real game sends the first 14 only,
so a driver with more of them cannot drive there.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from racer.game.checks import UserError
from racer.game.rules import CENTRELINE_RANGE, MAX_SPEED, MAX_YAW_RATE, NUM_RAYS, RAY_RANGE


class Observation(NamedTuple):
    name: str
    low: float
    high: float
    mean: float  # typical mean and standard deviation on the game's tracks, for the networks' normalisation
    std: float
    mean_any: float  # the same for good drivers on many tracks, with `hide_arc`
    std_any: float
    value: Callable | None  # (RacerSim, car indices) -> values (n,); None for the rays


HIDDEN = 1e15  # a standard deviation that makes an observation vanish
# Side rays tell how wide the road is; drivers of many tracks need them in finer resolution.
RAY_MEANS = (0.25, 0.27, 0.4, 0.7, 0.9, 0.7, 0.4, 0.27, 0.25)
RAY_STDS = (0.07, 0.08, 0.17, 0.2, 0.16, 0.2, 0.17, 0.08, 0.07)

# fmt: off
OBSERVATIONS = (  # name, low, high, mean, std, mean_any, std_any, value
    *(Observation(f"ray{i}", 0, 1, 0.25, 0.2, RAY_MEANS[i], RAY_STDS[i], None) for i in range(NUM_RAYS)),
    Observation("speed", 0, 1, 0.6, 0.25, 0.8, 0.2, lambda sim, cars: sim.speed[cars] * (1 / MAX_SPEED)),
    Observation("yawRate", -1, 1, 0.0, 0.3, 0.0, 0.25,
                lambda sim, cars: np.minimum(np.maximum(sim.yaw_rate[cars] * (1 / MAX_YAW_RATE), -1.0), 1.0)),
    Observation("steer", -1, 1, 0.0, 0.5, 0.0, 0.2, lambda sim, cars: sim.steer[cars]),
    Observation("arc", 0, 1, 0.5, 0.3, 0.0, HIDDEN,
                lambda sim, cars: sim.s[cars] / sim.world.length.take(sim.track[cars])),
    Observation("centreline", 0, 1, 0.2, 0.15, 0.15, 0.09,
                lambda sim, cars: np.minimum(sim.centre_distance[cars] * (1 / CENTRELINE_RANGE), 1.0)),
)
# fmt: on
OBS_NAMES = tuple(row.name for row in OBSERVATIONS)
OBS_SIZE = len(OBSERVATIONS)
OBS_LOW = np.array([row.low for row in OBSERVATIONS], np.float32)
OBS_HIGH = np.array([row.high for row in OBSERVATIONS], np.float32)
ARC, CENTRELINE = OBS_NAMES.index("arc"), OBS_NAMES.index("centreline")  # columns


def obs_moments(hide_arc: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance (OBS_SIZE,) for a network's normaliser. With `hide_arc` the network cannot see the arc position."""
    mean, std = zip(*((o.mean_any, o.std_any) if hide_arc else (o.mean, o.std) for o in OBSERVATIONS), strict=True)
    return np.array(mean, np.float32), np.square(std, dtype=np.float32)


def observe(sim, subcell, cars) -> np.ndarray:
    """Observations (n, OBS_SIZE) of the given cars. subcell: where they are (World.locate)"""
    observations = np.empty((len(subcell), OBS_SIZE))
    rays = sim.world.cast_rays(subcell, sim.x[cars], sim.y[cars], sim.heading[cars])
    np.multiply(rays.T, 1 / RAY_RANGE, out=observations[:, :NUM_RAYS])
    for column in range(NUM_RAYS, OBS_SIZE):
        observations[:, column] = OBSERVATIONS[column].value(sim, cars)
    flat = observations.reshape(-1)
    if not math.isfinite(np.dot(flat, flat)):
        _, column = np.argwhere(~np.isfinite(observations))[0]
        raise UserError(f"observation {OBS_NAMES[column]!r} is NaN or infinite; see its row in racer/game/observations.py")
    return observations
