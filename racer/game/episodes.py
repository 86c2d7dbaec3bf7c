"""What an environment keeps of the episodes of its cars: how long they are, what they earned, and which of them end early.

A car's own state, which the game has too, is in sim.py.
"""

from __future__ import annotations

import time

import numpy as np

from racer.game.observations import ARC
from racer.game.rewards import REWARD_TERMS
from racer.game.rules import REWARD_PARTS

NEVER = np.int64(2**62)
STAGGER_STRIDE = 7919  # a prime, so that neighbouring cars are far apart in the order of their first ends


class Episodes:
    """The running episodes of N cars.

    stagger: cut each car's first episode, each at another time, so that with many cars not all end in the same tick
    """

    OWN_STATE = ("returns", "lengths", "countdown")

    def __init__(self, num_cars: int, max_steps: int, stagger: bool, stuck_ticks: int):
        self.num_cars, self.max_steps, self.stuck = num_cars, max_steps, StuckDetector(num_cars, stuck_ticks)
        self.returns, self.lengths = np.zeros(num_cars), np.zeros(num_cars, np.int64)
        self.started_s = np.zeros(num_cars)
        self.first_cut = np.full(num_cars, NEVER)
        if stagger:
            places = np.arange(num_cars) * STAGGER_STRIDE % num_cars
            self.first_cut = np.ceil((places + 1) / num_cars * max_steps).astype(np.int64)
        self.stagger_again()

    def stagger_again(self) -> None:
        self.countdown = self.first_cut.copy()  # ticks until a car's episode is cut; an earlier end does not touch it

    def begin(self, cars, observations) -> None:
        """New episodes of these cars, which begin with these observations."""
        self.stuck.on_reset(cars, observations)
        self.returns[cars], self.lengths[cars], self.started_s[cars] = 0.0, 0, time.perf_counter()

    def tick(self, rewards, running, observations) -> tuple[np.ndarray, np.ndarray]:
        """After a tick of the running cars. -> which episodes are cut, and in which the car is stuck"""
        self.returns += running * rewards
        self.lengths += running
        self.countdown -= running
        return running & (self.countdown == 0), running & self.stuck.update(observations)

    def end(self, done, cut, observations, info: dict) -> dict:
        """What infos hold of the episodes that end in this step."""
        final_obs = np.full(self.num_cars, None, dtype=object)
        for i in np.flatnonzero(done):
            final_obs[i] = observations[i].copy()
        final_info = {key: np.where(done, value, value.dtype.type(0)) for key, value in info.items()}
        totals = {"r": self.returns, "l": self.lengths, "t": time.perf_counter() - self.started_s}
        episode = {key: np.where(done, value, value.dtype.type(0)) for key, value in totals.items()}
        episode["cut"] = cut & (self.lengths < self.max_steps)
        return {
            "final_obs": final_obs,
            "_final_obs": done.copy(),
            "final_info": with_masks(final_info, done),
            "_final_info": done.copy(),
            "episode": episode,
            "_episode": done & (self.lengths > 0),
        }

    def get_state(self) -> dict[str, np.ndarray]:
        own = {name: getattr(self, name).copy() for name in self.OWN_STATE}
        return own | {name: getattr(self.stuck, name).copy() for name in StuckDetector.STATE}

    def check_state(self, state: dict) -> None:
        for name in self.OWN_STATE:
            if np.shape(state.get(name)) != (self.num_cars,):
                raise ValueError(f"environment state {name!r} is not one of {self.num_cars} cars")

    def set_state(self, state: dict) -> None:
        for name in self.OWN_STATE:
            setattr(self, name, np.array(state[name]))
        for name in StuckDetector.STATE:
            setattr(self.stuck, name, np.array(state[name]))
        self.started_s = np.full(self.num_cars, time.perf_counter())


def with_masks(info: dict[str, np.ndarray], mask: np.ndarray) -> dict:
    """Gymnasium's form of vector infos: every key with a mask that says which cars have it."""
    infos = {}
    for key, value in info.items():
        infos[key], infos[f"_{key}"] = value, mask.copy()
    return infos


def add_tick(info: dict, now: dict, running: np.ndarray) -> dict:
    """The info of a step, and that of its next tick for the cars that are still running: reward parts and `lapTicks` add up."""
    if not info:
        return now
    sums, everyone = {*REWARD_PARTS, *REWARD_TERMS, "lapTicks"}, running.all()
    return {
        key: info[key] + running * value if key in sums else value if everyone else np.where(running, value, info[key])
        for key, value in now.items()
    }


class StuckDetector:
    """How many ticks each car has gone without making progress along the track. Stuck: for `limit` ticks (0: never)."""

    STATE = ("arc", "travelled", "farthest", "waiting")

    def __init__(self, num_cars: int, limit: int):
        if not isinstance(limit, (int, np.integer)) or isinstance(limit, bool) or limit < 0:
            raise ValueError(f"stuck_ticks is {limit!r}; it must be a number of ticks, or 0 for never")
        self.limit = limit
        self.arc, self.travelled, self.farthest = (np.zeros(num_cars) for _ in range(3))  # in laps
        self.waiting = np.zeros(num_cars, np.int64)

    def on_reset(self, cars, observations) -> None:
        self.arc[cars], self.travelled[cars], self.farthest[cars], self.waiting[cars] = observations[:, ARC], 0, 0, 0

    def update(self, observations) -> np.ndarray:
        """After a tick: which cars are stuck (N,)."""
        if not self.limit:
            return np.zeros(len(self.waiting), bool)
        gain = observations[:, ARC] - self.arc
        self.arc, self.travelled = observations[:, ARC].astype(float), self.travelled + gain - np.rint(gain)
        self.waiting = np.where(self.travelled > self.farthest, 0, self.waiting + 1)
        self.farthest = np.maximum(self.farthest, self.travelled)
        return self.waiting >= self.limit
