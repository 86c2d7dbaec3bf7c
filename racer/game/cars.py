"""Cars on either backend behind one interface: the embedded engine here, the real game in bridge.py. `make_cars` chooses.

The interface, with arrays over cars throughout:

    reset(cars, seeds) -> observations (n, OBS_SIZE), info      cars: indices; seeds: one per car, or None to continue
    step(actions, ticks, observing)                             hold the actions for some ticks; yields after each of them
                       -> observations (N, OBS_SIZE), rewards, terminated, truncated, info
                       observations may be None before the last tick, unless `observing`
    observe(cars)      -> observations (n, OBS_SIZE) of these cars after the tick that was yielded last
    places(cars, observations) -> arc position, x, y (n,) of these cars, after the last tick or, with these observations, a reset
    close()            idempotent
    track_ids          of every car
    off_road           which cars were off the road after the last tick (N,)

A car whose episode has ended drives on until the last tick, as in the game; the caller ignores it and resets it then.

`check_actions` checks what a user gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from racer.game.bridge import BridgeCars
from racer.game.checks import UserError, excerpt
from racer.game.rules import ACTION_NAMES, RESET_INFO, STARTS
from racer.game.sim import RacerSim
from racer.game.tracks import TRACKS, check_game_tracks

ENGINE_NAMES = {  # what the engine calls the entries of info, but for the reward parts
    "tick": "step_count", "rawSpeed": "speed", "lap": "lap", "checkpoint": "checkpoint", "stepCount": "step_count",
    "wallContact": "wall_contact", "stillnessCounter": "stillness",
}  # fmt: skip


class EmbeddedCars:
    """N cars on the embedded engine."""

    def __init__(self, num_cars: int, track_ids: Sequence[str], config: dict, start: str, first_car: int = 0):
        self.sim = RacerSim(num_cars, track_ids, config, start, first_car=first_car)
        self.track_ids = [track_ids[number] for number in self.sim.track]
        self.off_road = np.zeros(num_cars, bool)

    def reset(self, cars: np.ndarray, seeds: Sequence[int] | None = None):
        if seeds is not None:
            self.sim.seed_cars(cars, seeds)
        observations = self.sim.reset(cars).astype(np.float32)
        return observations, {key: getattr(self.sim, ENGINE_NAMES[key])[cars] for key in RESET_INFO}

    def step(self, actions: np.ndarray, ticks: int = 1, observing: bool = True):
        sim = self.sim
        for tick in range(1, ticks + 1):
            lap = sim.lap
            observations, rewards, terminated, truncated = sim.step(actions, observing or tick == ticks)
            self.off_road = sim.centre_distance > sim.half_width
            # Copies, so that callers cannot change the cars.
            info = sim.parts | {key: getattr(sim, name).copy() for key, name in ENGINE_NAMES.items()}
            same = sim.lap is lap  # a new array whenever a lap ends
            info["lapTicks"] = np.zeros_like(lap) if same else np.where(sim.lap > lap, sim.lap_ticks, 0)
            observations = None if observations is None else observations.astype(np.float32)
            yield observations, rewards, terminated, truncated, info

    def observe(self, cars: np.ndarray) -> np.ndarray:
        return self.sim.observe(cars).astype(np.float32)

    def places(self, cars=slice(None), observations=None):
        return self.sim.s[cars], self.sim.x[cars], self.sim.y[cars]

    def close(self) -> None:
        pass


def as_names(value, argument: str, hint: str) -> list[str]:
    """One name or a list of names -> a list of names."""
    names = [value] if isinstance(value, (str, Path)) else value
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, (str, Path)) for name in names):
        raise UserError(f"{argument} is {excerpt(value)}; it must be a string, or a list of at least one. {hint}")
    return [str(name) for name in names]


def make_cars(num_cars: int, track_id, config: dict, bridge_url, start: str, first_car: int = 0):
    """N cars on the embedded engine, or in the real game if bridge URLs are given. Checks everything that the user gave."""
    if isinstance(num_cars, bool) or not isinstance(num_cars, (int, np.integer)) or num_cars < 1:
        raise UserError(f"num_envs is {num_cars!r}; it must be a whole number, 1 or more")
    if start not in STARTS:
        raise UserError(f"unknown start {start!r}. Available: {', '.join(STARTS)}")
    track_ids = as_names(track_id, "track_id", f"Available: {', '.join(TRACKS)}")
    if bridge_url is None:
        return EmbeddedCars(int(num_cars), track_ids, config, start, first_car)
    urls = as_names(bridge_url, "bridge_url", "Leave it out to drive on the embedded engine")
    if start != "grid":
        raise UserError(f"start is {start!r}, but the real game always starts on the grid; leave it out with a bridge")
    check_game_tracks(track_ids)
    return BridgeCars(int(num_cars), track_ids, config, urls, first_car)


def check_actions(actions, shape: tuple[int, ...]) -> np.ndarray:
    """Actions as finite float64 of this shape, or a UserError that names the value. The box is not enforced: the game clamps."""
    try:
        array = np.asarray(actions)
    except ValueError as error:
        raise UserError(f"action is ragged: {excerpt(actions)}; it must have shape {shape}") from error
    if array.dtype.kind not in "fiu":
        found = f"action has dtype {array.dtype}: {excerpt(actions)}"
        raise UserError(f"{found}; it must be numbers {list(ACTION_NAMES)}")
    if array.shape != shape:
        wanted = f"{shape}: {list(ACTION_NAMES)}" + (" per car" * (len(shape) > 1))
        raise UserError(f"action has shape {array.shape}; it must have shape {wanted}")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        name = f"action of car {where[0]}: " if len(where) > 1 else "action: "
        raise UserError(f"{name}{ACTION_NAMES[where[-1]]} is {array[where]}; the game takes finite numbers only")
    return array
