"""The engine: N cars in lockstep, in NumPy, with the game's own numbers.

    from racer.game.sim import RacerSim
    sim = RacerSim(num_cars=1024, tracks=["track-01"])
    observations = sim.reset()
    observations, rewards, terminated, truncated = sim.step(actions)      # actions: (N, 3) steer, throttle, brake

Read rules.py, track.py and this file, and you know the game. A tick is `step`: car -> walls -> gates -> reward -> end ->
observation. One implementation serves one car and four thousand: a single car is N = 1. Everything is double precision, and a
step depends on the state alone, so `get_state` and `set_state` continue bit-exact.

How it compares with the recorded game (tests/test_parity.py): rays, speed, yaw rate and steer within 1e-9 over complete episodes;
counters, flags and penalties exactly; the arc position and progress within ARC_TOLERANCE, because the game itself finds the
nearest point of the centreline by a search that ends a little beside it.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence

import numpy as np

from racer.game.checks import UserError
from racer.game.observations import observe
from racer.game.random_numbers import first_state, uniform
from racer.game.rules import (
    ANYWHERE_HEADING, ANYWHERE_LATERAL, ANYWHERE_SPEED, BOUNCE, BRAKE_FORCE, BRAKE_SHARE, CAR_RADIUS, DEFAULT_CONFIG, DRAG,
    DRIVING_SPEED, DT_S, ENGINE_FORCE, GATES, GRIP, HARD_IMPACT, IMPACT_TURN, IMPACT_YAW_LOSS, MASS, MAX_SPEED,
    MAX_STEER_ANGLE, MAX_SWEEP, PUSH_REST, PUSH_SLIDE, RESTING_SPEED, REWARD_PARTS, ROLLING_RESISTANCE, SHOULDER_WIDTH,
    SLIDE_GRIP, SLIDE_GRIP_LOSS, SLIDE_KEEP, STARTS, STEER_FADE, STEER_SHARE, SURFACE_SPEED, SWEEP_STEP, THROTTLE_SHARE,
    TICKS_PER_SECOND, WALL_TOUCH, WHEELBASE,
)  # fmt: skip
from racer.game.tracks import load_track
from racer.game.world import world_of

ARC_TOLERANCE = 2e-4  # laps: how far the arc position may differ from the game's


class RacerSim:
    """N cars, each on its own copy of a track; car i drives tracks[(first_car + i) % len(tracks)].

    step(actions) advances all cars one tick and returns observations (N, 14), rewards (N,), terminated (N,), truncated (N,).
    Afterwards `parts` holds the six reward parts, and the state arrays below say the rest. As in the game, a step after the
    end of an episode is not refused: resetting is the caller's job (`reset(cars)`).

    The arrays a step returns, and the state arrays it leaves behind, are new ones every time: keep them as you like.
    """

    CAR = ("x", "y", "vx", "vy", "heading", "yaw_rate", "speed", "steer", "throttle", "brake")
    FLOATS = (*CAR, "s", "centre_distance", "half_width")
    COUNTERS = ("step_count", "stillness", "lap", "checkpoint", "lap_start", "lap_ticks")
    # lap_start: the tick at which the current lap began on the finish line, -1 on a lap begun elsewhere
    # lap_ticks: how long the last complete lap took, 0 before the first one
    # track_mark: a checksum of the car's track, so that a state is not restored on another one
    STATE = (*FLOATS, *COUNTERS, "wall_contact", "random_state", "track", "track_mark")

    def __init__(
        self,
        num_cars: int = 1,
        tracks: Sequence[str] = ("track-01",),
        config: dict | None = None,
        start: str = "grid",
        seed: int = 0,
        first_car: int = 0,
    ):
        if num_cars < 1:
            raise UserError(f"num_cars is {num_cars}; a simulation needs at least 1 car")
        if start not in STARTS:
            raise UserError(f"unknown start {start!r}. Available: {', '.join(STARTS)}")
        if isinstance(tracks, str) or not tracks:
            raise UserError(f"tracks must be a non-empty list of track names, got {tracks!r}")
        self.num_cars, self.start = num_cars, start
        self.config = DEFAULT_CONFIG if config is None else config
        self.world = world_of(tuple(load_track(track) for track in tracks))
        self.track = (first_car + np.arange(num_cars)) % len(tracks)
        marks = [zlib.crc32(track.control_points.tobytes()) for track in self.world.tracks]
        self.track_mark = np.array(marks, np.int64)[self.track]
        self.random_state = np.zeros(num_cars, np.int64)  # the bits of a uint64, which torch can save
        for name in self.FLOATS:
            setattr(self, name, np.zeros(num_cars))
        for name in self.COUNTERS:
            setattr(self, name, np.zeros(num_cars, np.int64))
        self.wall_contact = np.zeros(num_cars, bool)
        self.parts = {name: np.zeros(num_cars) for name in REWARD_PARTS}
        self.seed_cars(np.arange(num_cars), seed + np.arange(num_cars))
        self.reset()

    # -- state in, state out -------------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything the next step depends on, as plain arrays (N,). (`parts` are the last step's output.)"""
        return {name: getattr(self, name).copy() for name in self.STATE}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        missing = sorted(set(self.STATE) - set(state))
        if missing:
            raise UserError(f"this simulation state has no {', '.join(missing)}; another version saved it")
        for name in self.STATE:
            value, own = np.asarray(state[name]), getattr(self, name)
            if value.shape != own.shape or value.dtype != own.dtype:
                found = f"{name!r} is {value.dtype} {value.shape}, this simulation has {own.dtype} {own.shape}"
                raise UserError(f"simulation state {found}; put it into one with the same number of cars")
        if not all(np.array_equal(state[name], getattr(self, name)) for name in ("track", "track_mark")):
            raise UserError("simulation state is of other tracks than this simulation drives on")
        for name in self.STATE:
            setattr(self, name, np.array(state[name]))

    def seed_cars(self, cars, seeds) -> None:
        """A car's random numbers depend on its own seed alone. None leaves its stream as it is."""
        self.random_state = self.random_state.copy()
        for car, seed in zip(cars, seeds, strict=True):
            if seed is not None:
                self.random_state[car] = first_state(seed)

    def _random(self, cars):
        """The next uniform number in [0, 1) of each car."""
        numbers, self.random_state[cars] = uniform(self.random_state[cars])
        return numbers

    # -- reset ---------------------------------------------------------------------------------------------------------

    def reset(self, cars=None) -> np.ndarray:
        """New episodes for the given cars (indices; default all). -> their observations (n, 14)"""
        cars = np.arange(self.num_cars) if cars is None else np.asarray(cars)
        for name in (*self.FLOATS, *self.COUNTERS):
            setattr(self, name, getattr(self, name).copy())  # what a step handed out stays as it was
            getattr(self, name)[cars] = 0
        self.lap[cars] = 1
        track = self.track[cars]
        if self.start == "grid":
            start = np.array([(*t.position(0.0), *t.tangent(0.0)) for t in self.world.tracks])[track]
            x, y, heading = start[:, 0], start[:, 1], np.arctan2(start[:, 3], start[:, 2])
            self.place(cars, x, y, heading)
            self.checkpoint[cars] = self.lap_start[cars] = 0  # it stands on gate 0: by the rules it has crossed it
        else:
            self._start_anywhere(cars, track)
        return self.observe(cars)

    def _start_anywhere(self, cars, track) -> None:
        along, sideways, turn, speed = (self._random(cars) for _ in range(4))
        x, y, heading = np.zeros(len(cars)), np.zeros(len(cars)), np.zeros(len(cars))
        for number, t in enumerate(self.world.tracks):
            on = track == number
            s = along[on] * t.length
            lateral = (2 * sideways[on] - 1) * ANYWHERE_LATERAL
            centre, normal, left, right = t.road(s)
            lateral = lateral * np.maximum(np.where(lateral > 0, left, right), 0.0)
            tangent = t.tangent(s)
            place = centre + lateral[:, None] * normal
            located = self.world.locate(track[on], *place.T)[0]
            # Smoothed walls may cut a tight corner: start in the middle.
            blocked = self.world.clearance[located] < WALL_TOUCH
            x[on], y[on] = np.where(blocked[:, None], centre, place).T
            heading[on] = np.arctan2(tangent[:, 1], tangent[:, 0]) + (2 * turn[on] - 1) * ANYWHERE_HEADING
        self.place(cars, x, y, heading, speed * ANYWHERE_SPEED)

    def place(self, cars, x, y, heading, speed=0.0) -> None:
        """Put cars somewhere, driving straight ahead. The next gate is the first one ahead; the first lap starts at the line."""
        track = self.track[cars]
        self.x[cars], self.y[cars], self.heading[cars], self.speed[cars] = x, y, heading, speed
        self.vx[cars], self.vy[cars] = speed * np.cos(heading), speed * np.sin(heading)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            located = self.world.locate(track, self.x[cars], self.y[cars])
            s, distance, half_width = self.world.project(track, self.x[cars], self.y[cars], located)
        self.s[cars], self.centre_distance[cars], self.half_width[cars] = s, distance, half_width
        self.lap_start[cars] = -1
        # Gates are not quite at right angles to the road: ask the two nearest lines whether the car is past them.
        behind = np.minimum((s / self.world.length[track] * GATES).astype(np.int64), GATES - 1)
        past = [self._past_gate(track, (behind + i) % GATES, self.x[cars], self.y[cars]) for i in (0, 1)]
        self.checkpoint[cars] = (behind - 1 + past[0] + (past[0] & past[1])) % GATES

    def _past_gate(self, track, gate, x, y):
        w, i = self.world, track * GATES + gate

        def side(px, py):
            return w.gate_along_x[i] * (py - w.gate_y[i]) - w.gate_along_y[i] * (px - w.gate_x[i])

        ahead = side(w.gate_x[i] + w.gate_direction_x[i], w.gate_y[i] + w.gate_direction_y[i])
        return side(x, y) * ahead >= 0

    # -- one tick ------------------------------------------------------------------------------------------------------

    def step(self, actions, observing: bool = True):
        """One tick for all cars. actions (N, 3): steer in [-1, 1], throttle and brake in [0, 1]; clamped as in the game.

        -> observations (None unless `observing`, which takes half the time), rewards, terminated, truncated
        """
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            old_x, old_y, old_s = self.x, self.y, self.s
            self.step_car(actions)
            located = self.resolve_walls(old_x, old_y)
            self.s, self.centre_distance, self.half_width = self.world.project(self.track, self.x, self.y, located)
            self.step_count = self.step_count + 1
            self.cross_gates(old_x, old_y)
            rewards = self.reward(old_s)
            terminated = self.stillness >= self.config["episode"]["stillnessTimeoutTicks"]
            truncated = self.step_count >= self.config["episode"]["maxSteps"]
            return observe(self, located[0], slice(None)) if observing else None, rewards, terminated, truncated

    def step_car(self, actions) -> None:
        """Surface, inputs, steering, force, sliding, move: game steps 1 to 6."""
        steer, throttle, brake = np.ascontiguousarray(np.transpose(actions), dtype=np.float64)
        speed = self.speed
        # 1. the surface under the car, before it moves
        surface = self.surface()
        grip, factor = GRIP.take(surface), SURFACE_SPEED.take(surface)
        # 2. inputs approach their targets
        self.steer = self.steer + (np.minimum(np.maximum(steer, -1.0), 1.0) - self.steer) * STEER_SHARE
        self.throttle = self.throttle + (np.minimum(np.maximum(throttle, 0.0), 1.0) - self.throttle) * THROTTLE_SHARE
        self.brake = self.brake + (np.minimum(np.maximum(brake, 0.0), 1.0) - self.brake) * BRAKE_SHARE
        angle = self.steer * -MAX_STEER_ANGLE / (1.0 + STEER_FADE * speed)
        # 3. heading: seen from the rear axle, the front axle ends up at (ahead, aside)
        rolled = speed * DT_S
        driving = speed > DRIVING_SPEED
        ahead, aside = WHEELBASE + rolled * (np.cos(angle) - 1.0), rolled * np.sin(angle)
        change = np.where(driving, np.arctan2(aside, ahead), angle * rolled)
        self.heading = self.heading + change
        self.yaw_rate = change * TICKS_PER_SECOND
        # 4. force along the heading
        resistance = self.brake * BRAKE_FORCE + DRAG * speed * speed / factor + ROLLING_RESISTANCE
        slow = np.where(speed > RESTING_SPEED, np.minimum(resistance, speed * (TICKS_PER_SECOND * MASS)), 0.0)
        force = self.throttle * factor * ENGINE_FORCE - np.where(driving, resistance, slow)
        forward = np.minimum(np.maximum(speed + force * (DT_S / MASS), 0.0), MAX_SPEED)
        # 5. velocity: the new speed ahead, and what the grip leaves of the sideways part
        cos, sin = np.cos(self.heading), np.sin(self.heading)
        kept = 1.0 - grip * (SLIDE_GRIP - SLIDE_GRIP_LOSS * np.minimum(speed * (1 / MAX_SPEED), 1.0))
        sideways = (self.vy * cos - self.vx * sin) * kept
        self.speed = np.sqrt(forward * forward + sideways * sideways)
        scale = np.where(self.speed > MAX_SPEED, MAX_SPEED / self.speed, 1.0)
        self.speed = np.minimum(self.speed, MAX_SPEED)
        # (The game also stops a car that rolls backward below speed 1. The forward part is never negative, so none does.)
        self.vx, self.vy = (forward * cos - sideways * sin) * scale, (forward * sin + sideways * cos) * scale
        # 6. move
        self.x, self.y = self.x + self.vx * DT_S, self.y + self.vy * DT_S

    def surface(self):
        """0 road, 1 shoulder, 2 runoff. (N,)"""
        outside = self.centre_distance - self.half_width
        return (outside > 0).astype(np.intp) + (outside > SHOULDER_WIDTH)

    def resolve_walls(self, old_x, old_y):
        """Swept collision and its response: game step 7. Also sets wall_contact. -> where the cars are (World.locate)"""
        world = self.world
        located = world.locate(self.track, self.x, self.y)
        self.wall_contact = np.zeros(self.num_cars, bool)
        move_x, move_y = self.x - old_x, self.y - old_y
        # A car is out of danger if its last point is far enough from the walls to cover the whole move.
        near = (world.clearance.take(located[0]) < CAR_RADIUS + MAX_SPEED * DT_S).nonzero()[0]
        if not len(near):
            return located
        track, start_x, start_y, move_x, move_y = self.track[near], old_x[near], old_y[near], move_x[near], move_y[near]
        points = np.maximum(np.ceil(np.sqrt(move_x * move_x + move_y * move_y) * (1 / SWEEP_STEP)), 1.0)
        car, share = [], []
        for i in range(1, MAX_SWEEP + 1):
            on = (points >= i).nonzero()[0]
            car.append(on)
            share.append(i / points[on])
        car, share = np.concatenate(car), np.concatenate(share)
        x, y = start_x[car] + move_x[car] * share, start_y[car] + move_y[car] * share
        subcell = world.locate(track[car], x, y)[0]
        close = (world.clearance.take(subcell) < WALL_TOUCH).nonzero()[0]
        if not len(close):
            return located
        car, share, x, y = car[close], share[close], x[close], y[close]
        distance, wall_x, wall_y = world.nearest_wall(subcell[close], x, y)
        last = share == 1.0
        self.wall_contact[near[car[last]]] = distance[last] < WALL_TOUCH
        # The first point along the way that touches; points are in order of the way, so the last write is the first touch.
        touching = (distance < CAR_RADIUS).nonzero()[0][::-1]
        if not len(touching):
            return located
        first = np.full(len(near), -1)
        first[car[touching]] = touching
        touching = first[first >= 0]
        hit = near[car[touching]]
        self._bounce(hit, x[touching], y[touching], wall_x[touching], wall_y[touching], distance[touching])
        moved = world.locate(self.track[hit], self.x[hit], self.y[hit])
        for old, new in zip(located, moved, strict=True):
            old[hit] = new
        self.wall_contact[hit] = world.nearest_wall(moved[0], self.x[hit], self.y[hit])[0] < WALL_TOUCH
        return located

    def _bounce(self, hit, x, y, wall_x, wall_y, distance) -> None:
        """The response of cars `hit`, touching at (x, y) the wall point (wall_x, wall_y). The rest of the move is dropped."""
        apart = distance > 0
        normal_x = np.where(apart, (x - wall_x) / np.where(apart, distance, 1.0), 0.0)
        normal_y = np.where(apart, (y - wall_y) / np.where(apart, distance, 1.0), 1.0)
        vx, vy, speed, heading = self.vx[hit], self.vy[hit], self.speed[hit], self.heading[hit]
        inward = vx * normal_x + vy * normal_y
        leaving = inward >= 0
        push = CAR_RADIUS - distance + np.where(leaving, PUSH_REST, PUSH_SLIDE)
        self.x[hit], self.y[hit] = x + normal_x * push, y + normal_y * push
        slide_x, slide_y = vx - inward * normal_x, vy - inward * normal_y
        sliding = np.sqrt(slide_x * slide_x + slide_y * slide_y)
        self.vx[hit] = np.where(leaving, vx, slide_x * SLIDE_KEEP + normal_x * (BOUNCE * speed))
        self.vy[hit] = np.where(leaving, vy, slide_y * SLIDE_KEEP + normal_y * (BOUNCE * speed))
        self.speed[hit] = np.where(leaving, speed, np.hypot(self.vx[hit], self.vy[hit]))
        # A hard impact turns the car along the wall and takes yaw.
        straightness = np.where(speed > 1e-6, sliding / np.maximum(speed, 1e-6), 0.0)
        impact = np.arccos(np.clip(straightness, 0.0, 1.0)) / (math.pi / 2)
        hardness = np.where(leaving | (impact <= HARD_IMPACT), 0.0, 2.0 * (impact - HARD_IMPACT))
        wall_heading = np.where(sliding > 0, np.arctan2(slide_y, slide_x), np.arctan2(normal_x, -normal_y))
        turn = wall_heading - heading
        turn = turn - 2 * math.pi * np.rint(turn / (2 * math.pi))
        self.heading[hit] = heading + turn * IMPACT_TURN * hardness
        self.yaw_rate[hit] *= 1.0 - IMPACT_YAW_LOSS * hardness

    def cross_gates(self, old_x, old_y) -> None:
        """Only the next expected gate counts: game step 9."""
        world = self.world
        gate = self.checkpoint + 1
        gate = np.where(gate == GATES, 0, gate)
        index = self.track * GATES + gate
        along_x, along_y = world.gate_along_x.take(index), world.gate_along_y.take(index)
        gate_x, gate_y = world.gate_x.take(index), world.gate_y.take(index)
        old_side = along_x * (old_y - gate_y) - along_y * (old_x - gate_x)
        new_side = along_x * (self.y - gate_y) - along_y * (self.x - gate_x)
        crossed = (old_side * new_side <= 0).nonzero()[0]
        if not len(crossed):
            return
        # The line is crossed; between the gate's ends, and forward?
        index, along_x, along_y = index[crossed], along_x[crossed], along_y[crossed]
        move_x, move_y = self.x[crossed] - old_x[crossed], self.y[crossed] - old_y[crossed]
        det = move_x * along_y - move_y * along_x
        offset_x, offset_y = gate_x[crossed] - old_x[crossed], gate_y[crossed] - old_y[crossed]
        t = (offset_x * along_y - offset_y * along_x) / det
        u = (offset_x * move_y - offset_y * move_x) / det
        forward = move_x * world.gate_direction_x[index] + move_y * world.gate_direction_y[index] > 0
        crossed = crossed[forward & (t >= 0) & (t <= 1) & (u >= 0) & (u <= 1)]
        self.checkpoint = self.checkpoint.copy()
        self.checkpoint[crossed] = gate[crossed]
        finished = crossed[gate[crossed] == 0]
        if len(finished):
            whole = finished[self.lap_start[finished] >= 0]
            self.lap, self.lap_ticks, self.lap_start = self.lap.copy(), self.lap_ticks.copy(), self.lap_start.copy()
            self.lap[whole] += 1
            self.lap_ticks[whole] = self.step_count[whole] - self.lap_start[whole]
            self.lap_start[finished] = self.step_count[finished]

    def reward(self, old_s) -> np.ndarray:
        """The six parts and their sum. Also counts stillness."""
        weights = self.config["weights"]
        length = self.world.length.take(self.track)
        share = (self.s - old_s) / length
        share = share - np.rint(share)
        still = self.speed < weights["stillnessSpeedThreshold"]
        self.stillness = (self.stillness + 1) * still
        self.parts = {
            "progress": share * weights["progress"],
            "speed": self.speed * (weights["speedBonus"] / MAX_SPEED),
            "wall": self.wall_contact * weights["wallPenalty"],
            "offTrack": (self.centre_distance > self.half_width) * weights["offTrackPenalty"],
            "backward": (share < 0) * weights["backwardPenalty"],
            "stillness": still * weights["stillnessPenalty"],
        }
        progress, *others = self.parts.values()
        return functools.reduce(np.add, others, progress)

    def observe(self, cars=None) -> np.ndarray:
        """Observations of the given cars (indices; default all) as they stand. (n, OBS_SIZE)"""
        cars = np.arange(self.num_cars) if cars is None else cars
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            return observe(self, self.world.locate(self.track[cars], self.x[cars], self.y[cars])[0], cars)
