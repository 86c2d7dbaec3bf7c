"""What an environment adds to the cars' ticks: reward terms, stuck detection, recording; and what it keeps of episodes.

A car's own state, which the game has too, is in sim.py.
"""

from __future__ import annotations

import time

import numpy as np

from racer.game.checks import UserError
from racer.game.observations import ARC
from racer.game.rewards import REWARD_TERMS, add_reward_terms
from racer.game.rules import REWARD_PARTS

NEVER = np.int64(2**62)
STAGGER_STRIDE = 7919  # a prime, so that neighbouring cars are far apart in the order of their first ends
PLACE = ("x", "y", "heading", "speed", "steer", "throttle", "brake")  # of a car; inputs as it has smoothed them


class Fleet:
    """Cars on either backend (cars.py), with what both environments do in every tick.

    reset(cars, seeds) and ticks(actions, count) are those of the cars. Rewards include REWARD_TERMS; a car without progress for
    `stuck_ticks` is truncated. With `record`, `recorder` keeps where the cars have been (embedded engine only).
    """

    def __init__(self, cars, num_cars: int, stuck_ticks: int, record: bool):
        self.cars, self.stuck = cars, StuckDetector(num_cars, stuck_ticks)
        self.recorder = Recorder(cars.sim) if record else None

    def reset(self, cars, seeds=None):
        observations, info = self.cars.reset(cars, seeds)
        self.begin(cars, observations)
        return observations, info

    def begin(self, cars, observations, lengths=None) -> None:
        """These cars stand at the start of an episode, with these observations. lengths: ticks of their episodes before it"""
        self.stuck.on_reset(cars, observations)
        if self.recorder:
            self.recorder.begin(cars, lengths)

    def ticks(self, actions, count: int = 1):
        """Hold the actions for some ticks. Yields after each: observations or None, rewards, terminated, truncated, stuck or None,
        info"""
        observing = self.stuck.limit > 0 or bool(REWARD_TERMS)
        for observations, rewards, terminated, truncated, info in self.cars.step(actions, count, observing):
            if REWARD_TERMS:
                rewards = add_reward_terms(observations, actions, rewards, info)
            if self.recorder:
                self.recorder.follow()
            yield observations, rewards, terminated, truncated, self.stuck.update(observations), info


class Recorder:
    """Where every car has been: PLACE at the start of its running episode and after every tick, and of the last complete one."""

    def __init__(self, sim):
        self.sim = sim
        self.running: list[list[tuple]] = [[] for _ in range(sim.num_cars)]
        self.last: list[list[tuple]] = [[] for _ in range(sim.num_cars)]

    def begin(self, cars, lengths=None) -> None:
        for n, i in enumerate(cars):  # what a car did after its end, while others still held their actions, is left out
            end = None if lengths is None else lengths[n] + 1
            self.last[i], self.running[i] = self.running[i][:end], [self.place(i)]

    def follow(self) -> None:
        for i, places in enumerate(self.running):
            places.append(self.place(i))

    def place(self, car: int) -> tuple:
        return tuple(getattr(self.sim, name)[car] for name in PLACE)


class Episodes:
    """The running episodes of N cars: how long they are and what they earned.

    stagger: cut each car's first episode, each at another time, so that with many cars not all end in the same tick
    """

    STATE = ("returns", "lengths", "countdown")

    def __init__(self, num_cars: int, max_steps: int, stagger: bool):
        self.num_cars, self.max_steps = num_cars, max_steps
        self.returns, self.lengths = np.zeros(num_cars), np.zeros(num_cars, np.int64)
        self.started_s = np.zeros(num_cars)
        self.first_cut = np.full(num_cars, NEVER)
        if stagger:
            places = np.arange(num_cars) * STAGGER_STRIDE % num_cars
            self.first_cut = np.ceil((places + 1) / num_cars * max_steps).astype(np.int64)
        self.stagger_again()

    def stagger_again(self) -> None:
        self.countdown = self.first_cut.copy()  # ticks until a car's episode is cut; an earlier end does not touch it

    def begin(self, cars) -> None:
        self.returns[cars], self.lengths[cars], self.started_s[cars] = 0.0, 0, time.perf_counter()

    def tick(self, rewards, running) -> np.ndarray:
        """After a tick of the running cars. -> whose episode is cut"""
        self.returns += running * rewards
        self.lengths += running
        self.countdown -= running
        return (self.countdown == 0) & running

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
        return {name: getattr(self, name).copy() for name in self.STATE}

    def check_state(self, state: dict) -> None:
        for name in self.STATE:
            if np.shape(state.get(name)) != (self.num_cars,):
                raise UserError(f"environment state {name!r} is not one of {self.num_cars} cars")

    def set_state(self, state: dict) -> None:
        for name in self.STATE:
            setattr(self, name, np.array(state[name]))
        self.started_s = np.full(self.num_cars, time.perf_counter())


def with_masks(info: dict[str, np.ndarray], mask: np.ndarray) -> dict:
    """Gymnasium's form of vector infos: every key with a mask that says which cars have it."""
    infos, mask = {}, mask.copy()
    for key, value in info.items():
        infos[key] = value
        infos[f"_{key}"] = mask
    return infos


def add_tick(info: dict, now: dict, running: np.ndarray) -> dict:
    """The info of a step, and that of its next tick for the cars that are still running: reward parts and `lapTicks` add up."""
    sums = {*REWARD_PARTS, *REWARD_TERMS, "lapTicks"}
    if running.all():
        return {key: info[key] + value if key in sums else value for key, value in now.items()}
    return {
        key: info[key] + running * value if key in sums else np.where(running, value, info[key]) for key, value in now.items()
    }


class StuckDetector:
    """How many ticks each car has gone without making progress along the track. Stuck: for `limit` ticks (0: never)."""

    STATE = ("arc", "travelled", "farthest", "waiting")

    def __init__(self, num_cars: int, limit: int):
        if not isinstance(limit, (int, np.integer)) or isinstance(limit, bool) or limit < 0:
            raise UserError(f"stuck_ticks is {limit!r}; it must be a number of ticks, or 0 for never")
        self.limit = limit
        self.arc, self.travelled, self.farthest = (np.zeros(num_cars) for _ in range(3))  # in laps
        self.waiting = np.zeros(num_cars, np.int64)

    def on_reset(self, cars, observations) -> None:
        self.arc[cars], self.travelled[cars], self.farthest[cars], self.waiting[cars] = observations[:, ARC], 0, 0, 0

    def update(self, observations) -> np.ndarray | None:
        """After a tick: which cars are stuck (N,). None if nobody ever is."""
        if not self.limit:
            return None
        gain = observations[:, ARC] - self.arc
        self.arc, self.travelled = observations[:, ARC].astype(float), self.travelled + gain - np.rint(gain)
        self.waiting = np.where(self.travelled > self.farthest, 0, self.waiting + 1)
        self.farthest = np.maximum(self.farthest, self.travelled)
        return self.waiting >= self.limit

    def get_state(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name).copy() for name in self.STATE}

    def set_state(self, state: dict) -> None:
        for name in self.STATE:
            setattr(self, name, np.array(state[name]))
