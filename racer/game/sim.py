"""The racing game's engine, embedded: N cars in lockstep, in NumPy, with the game's own numbers.

    from racer.game.sim import RacerSim
    sim = RacerSim(num_cars=1024, tracks=["track-01"])
    observations = sim.reset()
    observations, rewards, terminated, truncated = sim.step(actions)      # actions: (N, 3) steer, throttle, brake

Read top to bottom and you know the game:

    1  constants       every number of the game, with its unit
    2  track           control points -> centreline, walls, gates
    3  tables          what makes the engine fast: which walls can matter from here, and where on the track is here
    4  world           the tables of one or several tracks, and the three questions asked of them every tick:
                       project (where along the track?), nearest_wall, cast_rays
    5  RacerSim        state, reset, step = car -> walls -> gates -> reward -> end -> observation

One implementation serves one car and four thousand: a single car is N = 1. Everything is double precision, and a step is
a function of the state alone, so `get_state` / `set_state` continue bit for bit. Parity with the recorded game is tested in
tests/test_parity.py: rays, speed, yaw and steer agree to 1e-9 over whole episodes.

Lengths are game units, angles radians (counter-clockwise positive), times seconds, speeds units/s.
Shapes: N cars, R = 9 rays, S wall segments, C control points.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# == 1  Constants ======================================================================================================

TICKS_PER_SECOND = 60
DT_S = 1.0 / TICKS_PER_SECOND

# -- car
MASS = 800.0
MAX_SPEED = 160.0
ENGINE_FORCE = 55_000.0
BRAKE_FORCE = 50_000.0
DRAG = 2.0
ROLLING_RESISTANCE = 150.0
WHEELBASE = 1.5
MAX_STEER_ANGLE = 0.37
STEER_FADE = 0.025  # the steer angle shrinks by 1 / (1 + STEER_FADE * speed)
INPUT_RATES = (24.0, 6.0, 10.0)  # steer, throttle, brake: share of the way to the target per second
STEER_SHARE, THROTTLE_SHARE, BRAKE_SHARE = (1.0 - math.exp(-rate * DT_S) for rate in INPUT_RATES)
SLIDE_GRIP = 0.85  # share of the sideways speed killed per tick,
SLIDE_GRIP_LOSS = 0.30  # and how much of it speed takes away
DRIVING_SPEED = 1.0  # above: bicycle steering and full resistance
RESTING_SPEED = 0.01  # at or below: no resistance

# -- surfaces: road, shoulder, runoff
GRIP = np.array([1.0, 0.7, 0.5])
SURFACE_SPEED = np.array([1.0, 0.85, 0.4])
SHOULDER_WIDTH = 24.0
RUNOFF_WIDTH = 30.0  # the walls stand this far outside the road

# -- walls
CAR_RADIUS = 1.0
WALL_TOUCH = 2.0  # a wall nearer than this counts as wall contact in the reward
SWEEP_STEP = 0.75  # a longer move is tested at points this far apart at most
MAX_SWEEP = math.ceil(MAX_SPEED * DT_S / SWEEP_STEP)
SLIDE_KEEP, BOUNCE = 0.7, 0.08
PUSH_SLIDE, PUSH_REST = 0.8, 0.5
HARD_IMPACT, IMPACT_TURN, IMPACT_YAW_LOSS = 0.5, 0.4, 0.5

# -- track
CHORDS = 20  # chords per control segment that define arc length
GATES = 30
MIN_OFFSET = 4.0  # a wall never comes nearer to the centreline than this (before smoothing)

# -- observation: 9 rays, speed, yaw rate, steer, arc length, centreline distance
RAY_ANGLES = np.radians(22.5) * np.arange(-4, 5)
NUM_RAYS = len(RAY_ANGLES)
RAY_RANGE = 200.0
MAX_YAW_RATE = 5.0
CENTRELINE_RANGE = 80.0
OBS_NAMES = (*(f"ray{i}" for i in range(NUM_RAYS)), "speed", "yawRate", "steer", "arc", "centreline")
OBS_LOW = np.array([0.0] * NUM_RAYS + [0.0, -1.0, -1.0, 0.0, 0.0], dtype=np.float32)
OBS_HIGH = np.ones(len(OBS_NAMES), dtype=np.float32)
OBS_SIZE = len(OBS_NAMES)
REWARD_PARTS = ("progress", "speed", "wall", "offTrack", "backward", "stillness")

DEFAULT_CONFIG = {
    "weights": {
        "progress": 1.0,
        "speedBonus": 0.0,
        "wallPenalty": -0.002,
        "offTrackPenalty": -0.001,
        "backwardPenalty": 0.0,
        "stillnessPenalty": -0.001,
        "stillnessSpeedThreshold": 2.0,
    },
    "episode": {"maxSteps": 3000, "stillnessTimeoutTicks": 180},
}

# -- start "anywhere": how far from the ideal a car may begin
ANYWHERE_LATERAL = 0.7  # share of the road's half-width
ANYWHERE_HEADING = 0.4  # radians to either side of the tangent
ANYWHERE_SPEED = 80.0  # units/s at most
STARTS = ("grid", "anywhere")

# fmt: off
TRACKS: dict[str, list[tuple[float, float, float]]] = {  # (x, y, half-width), closed
    "track-01": [(x, y, 25) for x, y in (
        (-150, 100), (-50, 100), (50, 100), (150, 100), (210, 70), (240, 0), (210, -70),
        (150, -100), (50, -100), (-50, -100), (-150, -100), (-210, -70), (-240, 0), (-210, 70))],
    "track-02": [
        (-500, 350, 30), (-150, 350, 30), (200, 350, 30), (280, 260, 24), (300, 120, 22), (260, -40, 26), (160, -160, 24),
        (30, -250, 24), (-130, -305, 26), (-300, -315, 26), (-430, -340, 28), (-530, -240, 26), (-590, -60, 26),
        (-590, 120, 26), (-550, 280, 28)],
    "track-03": [
        (-280, -220, 22), (-80, -220, 22), (20, -220, 22), (70, -218, 20), (110, -200, 20), (135, -175, 20), (145, -140, 20),
        (145, -100, 22), (145, -40, 22), (140, 5, 20), (120, 30, 20), (85, 45, 20), (40, 50, 20), (-40, 50, 22),
        (-120, 50, 22), (-180, 55, 20), (-215, 65, 12), (-245, 85, 12), (-265, 115, 12), (-270, 130, 12), (-265, 145, 12),
        (-245, 175, 12), (-215, 195, 12), (-180, 205, 20), (-100, 210, 22), (0, 210, 22), (80, 210, 22), (150, 220, 12),
        (210, 240, 12), (260, 280, 12), (260, 330, 12), (240, 370, 20), (195, 400, 20), (120, 410, 22), (20, 400, 22),
        (-80, 392, 22), (-180, 365, 22), (-280, 310, 24), (-360, 200, 24), (-400, 100, 24), (-410, 0, 24), (-390, -80, 24),
        (-340, -160, 22)],
}
# fmt: on
RANDOM_LENGTH, RANDOM_HALF_WIDTH = (1_100.0, 3_000.0), (11.0, 30.0)  # of the tracks random-N: about those of the game
MIN_CONTROL_POINTS, MAX_CONTROL_POINTS = 4, 500
SPLITMIX_STEP = 0x9E3779B97F4A7C15  # between the states of a generator of random numbers
MAX_EXTENT = 5_000.0  # units from the origin; beyond these limits a track's tables would take minutes and gigabytes

# == 2  Track: from control points to centreline, walls and gates ======================================================


class Track:
    """The geometry of one closed track, and the lookup tables (section 3) the engine drives on.

    centreline  spline(u) with u = control segment + t; arc length s is the sum of CHORDS chords a segment
    walls       two closed lines, `outer` counter-clockwise and `inner` clockwise: the road is always on their left
    gates       `gate_inner`, `gate_outer` (GATES, 2) end points and `gate_direction` (GATES, 2); gate 0 is the finish line
    """

    def __init__(self, name: str, control_points: Sequence[Sequence[float]]):
        self.name = name
        self.control_points = check_control_points(name, control_points)  # (C, 3)
        self._build_spline()
        self._build_walls()
        self._build_gates()
        self._check_road()

    @functools.cached_property
    def tables(self) -> Tables:
        return Tables(self)

    # -- centreline ----------------------------------------------------------------------------------------------------

    def _build_spline(self) -> None:
        """Centripetal Catmull-Rom as one cubic a segment, and the arc-length table over CHORDS chords a segment."""
        p1 = self.control_points[:, :2]
        p0, p2, p3 = np.roll(p1, 1, 0), np.roll(p1, -1, 0), np.roll(p1, -2, 0)
        d01, d12, d23 = (np.sqrt(np.hypot(*(b - a).T))[:, None] for a, b in ((p0, p1), (p1, p2), (p2, p3)))
        m1 = d12 * ((p1 - p0) / d01 - (p2 - p0) / (d01 + d12) + (p2 - p1) / d12)
        m2 = d12 * ((p2 - p1) / d12 - (p3 - p1) / (d12 + d23) + (p3 - p2) / d23)
        # cubic a + b t + c t^2 + d t^3, as (4, C, 2)
        self.cubic = np.stack([p1, m1, 3 * (p2 - p1) - 2 * m1 - m2, 2 * (p1 - p2) + m1 + m2])
        corners = self.spline(np.arange(len(p1) * CHORDS + 1) / CHORDS)
        chords = np.hypot(*np.diff(corners, axis=0).T)
        self.arc = np.concatenate([[0.0], np.cumsum(chords)])  # (C * CHORDS + 1,)
        self.length = float(self.arc[-1])

    def _cubic_at(self, u):
        """Segment coefficients (4, ..., 2) and t (..., 1) at loop parameter u."""
        segment = np.minimum(np.floor(u).astype(np.intp), len(self.control_points) - 1)
        return self.cubic.take(segment, axis=1), (u - segment)[..., None]

    def spline(self, u):
        (a, b, c, d), t = self._cubic_at(u)
        return a + t * (b + t * (c + t * d))

    def spline_with_derivatives(self, u):
        (a, b, c, d), t = self._cubic_at(u)
        return a + t * (b + t * (c + t * d)), b + t * (2 * c + t * 3 * d), 2 * c + t * 6 * d

    def parameter(self, s):
        """Arc length -> loop parameter: linear between the entries of the chord table."""
        return np.interp(np.mod(s, self.length), self.arc, np.arange(len(self.arc)) / CHORDS)

    def position(self, s):
        return self.spline(self.parameter(s))

    def tangent(self, s):
        derivative = self.spline_with_derivatives(self.parameter(s))[1]
        return derivative / np.hypot(derivative[..., 0], derivative[..., 1])[..., None]

    def half_width(self, s):
        """Half the road's width: linear in arc length between the control points."""
        widths = np.append(self.control_points[:, 2], self.control_points[0, 2])
        return np.interp(np.mod(s, self.length), self.arc[::CHORDS], widths)

    # -- walls and gates -----------------------------------------------------------------------------------------------

    def _build_walls(self) -> None:
        n = max(200, 12 * len(self.control_points))
        step = self.length / n
        s = np.arange(n) * step
        # 1. signed radius of the turn at every sample, positive to the left
        before, after = self.tangent(s - step / 2), self.tangent(s + step / 2)
        kappa = np.arccos(np.clip((before * after).sum(1), -1, 1)) / step
        radius = np.where(kappa < 1e-8, np.inf, 1.0 / np.maximum(kappa, 1e-8))
        turns_left = before[:, 0] * after[:, 1] - before[:, 1] * after[:, 0] >= 0
        # 2. on the inside of a turn tighter than the wall's offset, the wall moves in
        half_width = self.half_width(s)
        offset = half_width + RUNOFF_WIDTH
        cut = np.where(radius < offset + 4, offset - np.minimum(offset, np.maximum(MIN_OFFSET, radius - 4)), 0.0)
        # 3. smoothed along the track, 4. offset along the normals, 5. and the lines smoothed once more
        normal = self.tangent(s) @ np.array([[0.0, 1.0], [-1.0, 0.0]])  # (-ty, tx): to the left
        centre = self.position(s)
        walls, edges = [], []
        for side, inside in ((1.0, turns_left), (-1.0, ~turns_left)):
            reduction = np.where(inside, cut, 0.0)
            for _ in range(3):
                reduction = _circular_mean(reduction, 10)
            wall_offset = np.maximum(MIN_OFFSET, offset - reduction)
            line = centre + side * wall_offset[:, None] * normal
            for _ in range(2):
                line = np.stack([_circular_mean(line[:, 0], 4), _circular_mean(line[:, 1], 4)], axis=1)
            walls.append(line)
            edges.append(np.minimum(half_width, wall_offset - 2))
        areas = [_signed_area(line) for line in walls]
        self.outer, self.inner = walls if abs(areas[0]) > abs(areas[1]) else walls[::-1]
        self.road_left, self.road_right = edges  # (n,) the road's edges, for pictures and starts
        self.wall_s = s

    def _build_gates(self) -> None:
        n = len(self.wall_s)
        s = np.arange(GATES) * self.length / GATES
        reach = max(5, math.ceil(n / GATES))
        middle = np.floor(s / self.length * n + 0.5).astype(np.intp)
        window = (middle[:, None] + np.arange(-reach, reach + 1)) % n  # (GATES, 2 reach + 1)
        centre = self.position(s)
        ends = []
        for line in (self.inner, self.outer):
            distances = np.hypot(*(line[window] - centre[:, None]).transpose(2, 0, 1))
            ends.append(line[window[np.arange(GATES), distances.argmin(1)]])
        self.gate_inner, self.gate_outer = ends
        self.gate_direction = self.tangent(s)
        # Walls were built in driving order (the gates need that); from here on the road is on the left of both lines.
        if _signed_area(self.outer) < 0:
            self.outer = self.outer[::-1].copy()
        if _signed_area(self.inner) > 0:
            self.inner = self.inner[::-1].copy()

    def _check_road(self) -> None:
        """A car must be able to follow the centreline, around once, without touching a wall."""
        tangent = self.tangent(np.arange(math.ceil(self.length / 2)) * 2.0)
        angle = np.arctan2(tangent[:, 1], tangent[:, 0])
        turned = np.mod(np.diff(angle, append=angle[0]) + math.pi, 2 * math.pi) - math.pi
        times = round(abs(float(turned.sum())) / (2 * math.pi))
        if times > 1:
            raise ValueError(f"track {self.name!r}: the control points run around {times} times; list each point once")
        s = np.arange(math.ceil(self.length / 4)) * 4.0
        centre = self.position(s)
        start, edge = _wall_segments(self)
        slices = (centre[i : i + 64] for i in range(0, len(centre), 64))  # 64 x some 500 distances at a time
        clearance = np.sqrt(np.concatenate([_squared_to_segments(p, start, edge).min(1) for p in slices]))
        worst = int(clearance.argmin())
        if not clearance[worst] > WALL_TOUCH:
            knots = self.arc[:-1:CHORDS]
            gap = np.abs(knots - s[worst])
            point = int(np.minimum(gap, self.length - gap).argmin())
            raise ValueError(
                f"track {self.name!r}: the walls leave no road near control point {point} {_show(self.control_points[point])}: "
                f"a wall comes within {clearance[worst]:.2f} units of the centreline at ({centre[worst][0]:.0f}, "
                f"{centre[worst][1]:.0f}), a car needs more than {WALL_TOUCH:g}. The turn is too tight, or two parts of the track "
                f"come too close (walls stand {RUNOFF_WIDTH:g} outside the road): move the points apart or widen the turn."
            )


def check_control_points(name: str, control_points) -> np.ndarray:
    """Control points as a (C, 3) array, or a ValueError that says which point is wrong and why."""
    if not isinstance(control_points, (list, tuple, np.ndarray)):
        found = type(control_points).__name__
        raise ValueError(f"track {name!r}: control_points must be a list of [x, y, half_width], got {found}")
    found = f"track {name!r}: {len(control_points)} control points"
    if len(control_points) < MIN_CONTROL_POINTS:
        raise ValueError(f"{found}; a closed track needs at least {MIN_CONTROL_POINTS}")
    if len(control_points) > MAX_CONTROL_POINTS:
        limit = f"the engine takes {MAX_CONTROL_POINTS} at most"
        raise ValueError(f"{found}; {limit}. The spline is smooth: take every other one")
    for i, point in enumerate(control_points):
        label = f"track {name!r}: control point {i}"
        if not isinstance(point, (list, tuple, np.ndarray)) or len(point) != 3:
            raise ValueError(f"{label} is {point!r}; each point is [x, y, half_width]")
        if not all(is_finite(v) for v in point):
            raise ValueError(f"{label} {list(point)!r} has a value that is not a finite number")
        label += f" {_show(point)}"
        if point[2] <= 0:
            raise ValueError(f"{label} has half-width {point[2]:g}; it must be greater than 0")
        if max(abs(point[0]), abs(point[1]), point[2]) > MAX_EXTENT:
            raise ValueError(f"{label} lies outside +-{MAX_EXTENT:g} units, the largest track the engine takes")
        other = (i + 1) % len(control_points)
        if tuple(point[:2]) == tuple(control_points[other][:2]):
            raise ValueError(f"{label} is at the same place as point {other}; remove one (the loop closes by itself)")
    return np.array(control_points, dtype=np.float64)


def is_finite(value) -> bool:
    """A number that a float can hold. (True is none, nor is a whole number of 400 digits.)"""
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and abs(value) < 1.79e308


def start_of(value, length: int = 80) -> str:
    """The beginning of anything, for a message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= length else text[:length] + "..."


def load_track(track_id: str) -> Track:
    """A built-in track or a random one by name, or a track from a JSON file by path. Built once a process."""
    if track_id in TRACKS:
        return _cached_track(track_id, tuple(TRACKS[track_id]))
    if number := re.fullmatch(r"random-(\d{1,15})", str(track_id)):
        return random_track(int(number[1]))
    path, form = Path(track_id), '{"name": ..., "control_points": [[x, y, half_width], ...]}'
    if path.suffix.lower() != ".json":
        names = f"{', '.join(TRACKS)}, random-1, random-2 and so on"
        raise ValueError(f"unknown track {track_id!r}. Available: {names}, or the path of a .json file {form}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"track file {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"track file {path} is not JSON: {error}") from error
    if not isinstance(data, dict) or "control_points" not in data:
        raise ValueError(f"track file {path} must be an object {form}")
    name = data.get("name", path.stem)
    if not isinstance(name, str) or not name:
        raise ValueError(f"track file {path}: name must be a text, got {name!r}")
    points = check_control_points(name, data["control_points"])
    return _cached_track(name, tuple(map(tuple, points.tolist())))


@functools.cache
def _cached_track(name: str, control_points: tuple) -> Track:
    return Track(name, control_points)


@functools.cache
def random_track(number: int) -> Track:
    """Track random-N, the same for everybody: the first of some loops, ever tamer, on which a car can drive."""
    # Of any numbers in a row, lengths, widths and wildness are spread evenly: multiples of a square root, without the whole.
    size, wide, wild = (number * math.sqrt(prime) % 1 for prime in (2, 3, 5))
    for attempt in itertools.count():
        points = _random_loop(number << 16 | attempt, size, wide, (0.3 + 0.7 * wild) * 0.97**attempt)
        if points is not None:
            with contextlib.suppress(ValueError):
                track = Track(f"random-{number}", points)
                if not _crossing_segments(*_wall_segments(track)).any():
                    return track


def _random_loop(state: int, size: float, wide: float, wild: float) -> np.ndarray | None:
    """A loop with dents (hairpins), bent twice, and kinked in places (chicanes). None if parts of it are too close."""

    def pick(low: float, high: float) -> float:
        nonlocal state
        state = (state + SPLITMIX_STEP) % 2**64
        return low + (high - low) * (int(_scramble(np.array([state], np.uint64))[0]) >> 11) / 2**53

    length = RANDOM_LENGTH[0] + size * (RANDOM_LENGTH[1] - RANDOM_LENGTH[0])
    # 1. a loop around a middle: waves, then dents
    angle = np.linspace(0, 2 * math.pi, 400, endpoint=False)
    waves = (pick(0, 0.35) / math.sqrt(k) * np.cos(k * angle + pick(0, 2 * math.pi)) for k in (2, 3, 4, 5))
    radius = 1 + wild * sum(waves)
    for _ in range(int(pick(0, 1.5 + 2.5 * size))):  # a longer track has room for more
        away = np.mod(angle - pick(0, 2 * math.pi), 2 * math.pi) - math.pi
        radius *= 1 - pick(0.2, 0.75) * wild * np.exp(-((away / pick(0.2, 0.45)) ** 2))
    x, y = radius * np.cos(angle), radius * np.sin(angle) * pick(0.6, 1)
    # 2. bent, so that it need not go around its middle any more
    for _ in range(2):
        x, y = y, x + pick(0, 0.45) * wild * np.sin(2 * math.pi * y / pick(1.2, 2.5) + pick(0, 2 * math.pi))
    # 3. control points along it, not quite evenly
    arc = np.append(0, np.cumsum(np.hypot(np.diff(x, append=x[0]), np.diff(y, append=y[0]))))
    count = min(max(round(length / pick(55, 110)), 12), 40)
    uneven = pick(0, 0.2)
    s = (np.arange(count) + [pick(-uneven, uneven) for _ in range(count)]) * (arc[-1] / count)
    points = np.stack([np.interp(s, arc[:-1], v, period=arc[-1]) for v in (x, y)], axis=1) * (length / arc[-1])
    width = RANDOM_HALF_WIDTH[0] + wide * (RANDOM_HALF_WIDTH[1] - RANDOM_HALF_WIDTH[0])
    width *= 1 + pick(0, 0.35) * np.cos(2 * math.pi * int(pick(1, 4)) * s / arc[-1] + pick(0, 2 * math.pi))
    # 4. chicanes: some points move to the left and to the right in turn
    for _ in range(int(pick(0, 3.5 * wild))):
        first, aside = int(pick(0, count)), pick(8, 22)
        for i in range(first, first + int(pick(2, 5))):
            along = points[(i + 1) % count] - points[(i - 1) % count]
            points[i % count] += aside * (-1) ** i * np.array([-along[1], along[0]]) / np.hypot(*along)
    # 5. it begins where it is straightest, and goes either way around
    edge = np.diff(points, axis=0, append=points[:1])
    turn = np.abs(np.angle((edge @ [1, 1j]) / np.roll(edge @ [1, 1j], 1)))
    straightest = int((turn + np.roll(turn, 1) + np.roll(turn, -1)).argmin())
    points = np.roll(np.column_stack([points, np.clip(width, *RANDOM_HALF_WIDTH)]), -straightest, axis=0)
    points = points[:: 1 if pick(0, 1) < 0.5 else -1].round(1)  # rounded: machines differ in the last bit of a cosine
    # A quick look whether walls would cross: two places with far more road between them than air.
    walls = points[:, None, 2] + points[:, 2] + 2 * RUNOFF_WIDTH
    close = _squared_distances(points, points) < walls**2
    apart = np.abs(np.arange(count)[:, None] - np.arange(count)) * (length / count)
    return None if (close & (np.minimum(apart, length - apart) > 1.6 * walls)).any() else points


def _scramble(z):
    """splitmix64's output function: uint64 -> uint64, one to one, no visible order left."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _show(point) -> str:
    return "(" + ", ".join(f"{v:g}" for v in point) + ")"


def _circular_mean(values, reach: int):
    """Box filter of 2 reach + 1 samples around a closed line."""
    return np.convolve(np.pad(values, reach, mode="wrap"), np.ones(2 * reach + 1), "valid") / (2 * reach + 1)


def _signed_area(line) -> float:
    (x, y), (x1, y1) = line.T, np.roll(line, -1, 0).T
    return float((x * y1 - x1 * y).sum() / 2)


def _squared_distances(points, others):
    return (points[:, None, 0] - others[:, 0]) ** 2 + (points[:, None, 1] - others[:, 1]) ** 2


def _wall_segments(track: Track):
    """All wall segments as start (S, 2) and edge vector (S, 2): the outer wall's, then the inner wall's."""
    start = np.concatenate([track.outer, track.inner])
    return start, np.concatenate([np.roll(track.outer, -1, 0), np.roll(track.inner, -1, 0)]) - start


def _crossing_segments(start, edge):
    """Which segments cross another one that is not their neighbour. (S,) bool"""
    middle, half = start + edge / 2, np.hypot(*edge.T) / 2
    pairs = []
    for first in range(0, len(start), 256):  # 256 x S pairs at a time
        some = slice(first, first + 256)
        i, j = np.nonzero(_squared_distances(middle[some], middle) <= (half[some, None] + half) ** 2)
        pairs.append(np.stack([i + first, j])[:, i + first < j])
    i, j = np.concatenate(pairs, axis=1)
    (ex, ey), (fx, fy), (wx, wy) = edge[i].T, edge[j].T, (start[j] - start[i]).T
    det = ex * fy - ey * fx
    with np.errstate(divide="ignore", invalid="ignore"):
        t, u = (wx * fy - wy * fx) / det, (wx * ey - wy * ex) / det
    inner = 1e-9  # neighbours share an end point and no more
    crossed = (t > inner) & (t < 1 - inner) & (u > inner) & (u < 1 - inner)
    return np.isin(np.arange(len(start)), np.concatenate([i[crossed], j[crossed]]))


def _squared_to_segments(points, start, edge):
    """The squared distance of every point (P, 2) to every segment (S, 2). -> (P, S), in the precision of what is given"""
    (px, py), (sx, sy), (ex, ey) = points.T, start.T, edge.T
    x, y = px[:, None] - sx, py[:, None] - sy
    share = np.minimum(np.maximum((x * ex + y * ey) / (ex * ex + ey * ey), 0), 1)
    x -= share * ex
    y -= share * ey
    return x * x + y * y


# == 3  Tables: what could matter from here ============================================================================

CELL = 12.0  # edge of a square cell; a cell knows, for each direction bin, which walls a ray can meet first
BINS = 64  # direction bins; the 22.5 degrees between rays are exactly 4 of them
BIN = 2 * math.pi / BINS
RAY_BINS = np.rint(RAY_ANGLES / BIN).astype(np.intp)[:, None]  # (R, 1)
SPLIT = 6  # a cell has SPLIT x SPLIT subcells; a subcell knows where on the track it is and which walls are near
SUBCELL = CELL / SPLIT
MAX_CHAIN = 16  # a ray finds its wall in a chain of up to this many neighbours by bisection
CHAIN_HALVES = (8, 4, 2, 1)
CHAIN_BITS = 5  # a row is `first << CHAIN_BITS | length`; length 0 means "first is the number of a candidate list"
PAD = MAX_CHAIN + 4  # closed lines are stored with this much overlap, so that a chain never has to wrap
BLOCK = 7  # tables are built for BLOCK x BLOCK cells at a time
SAMPLE_SPACING = 2.0  # of the centreline samples that guesses are made from
CELL_RADIUS, SUBCELL_RADIUS = CELL * math.sqrt(0.5), SUBCELL * math.sqrt(0.5)
LEAST_BEND = 0.2  # nearer to a centre of curvature than this share of its radius, the projection is searched for
LONGEST_STEP = 0.35  # units; a guess that has to be corrected by more is not trusted


class Tables:
    """What the engine looks up instead of testing everything: built once per track, some 0.3 s and 10 MB.

    Cells cover the road between the walls and one cell around. Cell 0 stands for everywhere else and is exact but slow.

    Rays. For a cell and a direction bin, take all rays that start in the cell and point into the bin (the "family"). As a
    rule they all end on one stretch of one wall, with nothing in front of it: a *chain* of neighbouring segments. Seen from
    the road, the bearing of a wall's vertices grows along the line, so bisection over the chain's vertices finds the
    segment a ray hits, exactly. Where the family can also meet something else (a corner that hides the wall behind it),
    the row names a *list* of all segments that may be hit first, and the ray tests each.

    Projection. Each subcell knows the spline parameter nearest to its centre, and how it changes with position.

    Walls. Each subcell has a lower bound of the distance to the nearest wall, and the list of walls within WALL_TOUCH.
    """

    def __init__(self, track: Track):
        self._index_cells(track)
        self._index_walls(track)
        self._build_subcells(track)
        self._build_rays()

    # -- cells ---------------------------------------------------------------------------------------------------------

    def _index_cells(self, track: Track) -> None:
        """Number the cells that touch the road between the walls (and one around them), block by block."""
        low, high = track.outer.min(0) - 2 * CELL, track.outer.max(0) + 2 * CELL
        self.origin = low
        width, height = np.ceil((high - low) / CELL).astype(int)
        # A cell's centre is between the walls if a horizontal line from it crosses them an odd number of times.
        crossings = np.zeros((height, width + 1), np.intp)
        centre_y = low[1] + (np.arange(height) + 0.5) * CELL
        for a in (track.outer, track.inner):
            b = np.roll(a, -1, 0)
            row, i = np.nonzero((a[:, 1] <= centre_y[:, None]) != (b[:, 1] <= centre_y[:, None]))
            x = a[i, 0] + (centre_y[row] - a[i, 1]) * (b[i, 0] - a[i, 0]) / (b[i, 1] - a[i, 1])
            np.add.at(crossings, (row, np.ceil((x - low[0]) / CELL - 0.5).astype(np.intp)), 1)
        inside = crossings.cumsum(1)[:, :width] % 2 == 1
        padded = np.pad(inside, 1)
        covered = np.logical_or.reduce([padded[i : i + height, j : j + width] for i in range(3) for j in range(3)])
        row, column = np.nonzero(covered)
        order = np.lexsort((column, row, column // BLOCK, row // BLOCK))
        row, column = row[order], column[order]
        self.width = int(width)
        self.cell_of = np.zeros(height * width, np.int32)  # (height * width,) -> cell number, 0 where not covered
        self.cell_of[row * width + column] = 1 + np.arange(len(row))
        self.centres = low + (np.stack([column, row], axis=1) + 0.5) * CELL  # (cells - 1, 2)
        block = (row // BLOCK) * (width // BLOCK + 1) + column // BLOCK
        edges = np.flatnonzero(np.diff(block)) + 1
        self.blocks = list(zip([0, *edges], [*edges, len(row)], strict=True))  # slices of `centres`

    def _index_walls(self, track: Track) -> None:
        """Wall vertices with overlap at both ends, segment j from vertex j to j + 1; the last segment is out of reach.

        Every line is stored twice, the second time backwards: segment `mirrored[i]` is `real[i]` seen from behind.
        """
        walls = (track.outer, track.inner, track.outer[::-1], track.inner[::-1])
        lines = [np.pad(line, ((PAD, PAD + 1), (0, 0)), mode="wrap") for line in walls]
        self.vertex = np.concatenate([*lines, np.zeros((2, 2))])
        n = len(track.outer)
        one_after_another = np.arange(4)[:, None] * len(lines[0]) + PAD + np.arange(n)  # (4, n)
        backwards = (n - 2 - np.arange(n)) % n
        self.real = one_after_another[:2].ravel()  # (S,) one index per segment
        self.mirrored = one_after_another[2:, backwards].ravel()
        self.following = np.concatenate([np.roll(np.arange(n), -1), n + np.roll(np.arange(n), -1)])
        self.crossing = _crossing_segments(*_wall_segments(track))
        self.edge = edge = np.diff(self.vertex, axis=0)
        self.nothing = len(edge) - 1
        nowhere = [*(np.cumsum([len(line) for line in lines]) - 1), self.nothing]  # also the joints between lines
        edge[nowhere] = 1.0
        # To the left: to the road.
        self.normal = edge / np.hypot(*edge.T)[:, None] @ np.array([[0.0, 1.0], [-1.0, 0.0]])
        self.offset = (self.normal * self.vertex[:-1]).sum(1)  # normal . p = offset on the segment's line
        self.normal[nowhere], self.offset[nowhere] = 0.0, np.inf
        self.vertex_x, self.vertex_y = self.vertex.T.copy()
        self.normal_x, self.normal_y = self.normal.T.copy()

    # -- subcells: projection and near walls -------------------------------------------------------------------------------

    def _build_subcells(self, track: Track) -> None:
        cells = len(self.centres) + 1
        self.guess = np.full((3, cells * SPLIT**2), np.nan)  # parameter u at the centre, du/dx, du/dy per subcell edge
        self.clearance = np.full(cells * SPLIT**2, np.inf, np.float32)
        self.wall_list = np.zeros(cells * SPLIT**2, np.int32)
        grid = (np.arange(SPLIT) + 0.5) * SUBCELL - CELL / 2
        inner = np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)  # row by row, as in World.locate
        count = math.ceil(track.length / SAMPLE_SPACING)
        samples_u = track.parameter(np.arange(count) * track.length / count)
        samples = track.spline(samples_u)
        start, edge = self.vertex[self.real], self.edge[self.real]
        near_cells, near_walls = [], []
        for first, stop in self.blocks:
            points = (self.centres[first:stop, None] + inner).reshape(-1, 2)
            where = slice((first + 1) * SPLIT**2, (stop + 1) * SPLIT**2)
            middle = points.mean(0)
            reach = np.hypot(*(points - middle).T).max()
            self.guess[:, where] = self._project_centres(track, self.centres[first:stop], points, samples_u, samples)
            # walls, in single precision: the bounds are taken a little wider than they are
            to_middle = np.sqrt(_squared_to_segments(middle[None], start, edge)[0])
            chosen = np.flatnonzero(to_middle <= max(to_middle.min(), WALL_TOUCH + SUBCELL) + 2 * reach)
            nearby = (points - middle, start[chosen] - middle, edge[chosen])
            squared = _squared_to_segments(*(np.float32(array) for array in nearby))
            margin = SUBCELL_RADIUS + 1e-3
            self.clearance[where] = np.maximum(0, np.sqrt(squared.min(1)) - margin)
            i, j = np.nonzero(squared < (WALL_TOUCH + margin) ** 2)
            near_cells.append(where.start + i)
            near_walls.append(self.real[chosen[j]])
        self._pack_wall_lists(np.concatenate(near_cells), np.concatenate(near_walls))

    def _project_centres(self, track: Track, cells, points, samples_u, samples):
        """Nearest spline parameter and its gradient for the subcells `points` of one block; NaN where it is not unique. -> (3, P)

        Whole cells are asked first. Only where the nearest place is not unique in a cell, each of its subcells is asked.
        """
        found = self._nearest_samples(track, cells, CELL_RADIUS, 0.5, samples_u, samples)
        u, unique = (v.repeat(SPLIT**2) for v in found)
        if len(rest := np.flatnonzero(~unique)):
            each = self._nearest_samples(track, points[rest], SUBCELL_RADIUS, LEAST_BEND, samples_u, samples)
            u[rest], unique[rest] = each
        for _ in range(3):
            p, q, r = track.spline_with_derivatives(np.mod(u, len(track.control_points)))
            p = p - points
            bend = np.where(unique, (q * q + p * r).sum(1), 1.0)
            step = np.where(unique, (p * q).sum(1) / bend, 0)
            u = u - step
        return np.where(unique, np.stack([u, *(q * (SUBCELL / bend)[:, None]).T]), np.nan)

    @staticmethod
    def _nearest_samples(track: Track, points, radius, least_bend, samples_u, samples):
        """The parameter of the sample nearest to each point, and whether what is nearest is unique for the disc around it. (P,)

        What is nearest to some point of a disc is little farther from its centre than what is nearest to that (`within`),
        and lies about at right angles to it (`zone`). If each of the two is one piece, and none of the zone curves around the
        car more tightly than the car is far from it, then the distance has a single minimum, wherever in the disc the car is.
        """
        middle = points.mean(0)
        to_middle, reach = np.hypot(*(samples - middle).T), np.hypot(*(points - middle).T).max()
        chosen = np.flatnonzero(to_middle <= to_middle.min() + 2 * (reach + radius) + 1)
        _, q, r = track.spline_with_derivatives(samples_u[chosen])
        slope = (q * q).sum(1)
        tangent = q / np.sqrt(slope)[:, None]
        curvature = (r - (r * tangent).sum(1)[:, None] * tangent) / slope[:, None]  # as a vector to its centre
        # All (P, S): how far each sample is, how far ahead of a right angle, and its bend, 0 at the centre of curvature.
        far = np.sqrt(_squared_distances(np.float32(points - middle), np.float32(samples[chosen] - middle)))
        ahead = (samples[chosen] * tangent).sum(1) - points @ tangent.T
        bend = 1 + (samples[chosen] * curvature).sum(1) - points @ curvature.T
        nearest = far.argmin(1)
        within = far <= far.min(1)[:, None] + 2 * radius + 0.2
        zone = within & (np.abs(ahead) <= radius + 0.2)
        tight = bend < radius * np.hypot(*curvature.T) + least_bend
        after_a_gap = np.diff(chosen, prepend=chosen[-1] - len(samples)) != 1
        unique = ~(zone & tight).any(1)
        for those in (within, zone):
            unique &= (those & (after_a_gap | ~np.roll(those, 1, 1))).sum(1) <= 1  # begins once: one piece
        return samples_u[chosen[nearest]], unique

    def _pack_wall_lists(self, subcell, wall) -> None:
        """Pairs (subcell, wall), in order -> a table of lists of equal width, filled up with the segment that is nowhere."""
        cells, first, count = np.unique(subcell, return_index=True, return_counts=True)
        self.walls = np.full((1 + len(cells), max(1, count.max(initial=0))), self.nothing, np.intp)
        row = np.repeat(np.arange(len(cells)), count)
        self.walls[1 + row, np.arange(len(wall)) - first[row]] = wall
        self.wall_list[cells] = 1 + np.arange(len(cells))

    # -- rays ----------------------------------------------------------------------------------------------------------

    def _build_rays(self) -> None:
        segments = len(self.real)
        self.rows = np.zeros((len(self.centres) + 1) * BINS, np.int32)  # cell 0: list 0, every wall there is
        rows, walls = [np.zeros(2 * segments, np.intp)], [np.concatenate([self.real, self.mirrored])]
        for first, stop in self.blocks:
            block_rows, listed_rows, listed_walls = _RayBlock(self, self.centres[first:stop]).build()
            base = (first + 1) * BINS
            self.rows[base : base + len(block_rows)] = block_rows
            rows.append(base + listed_rows)
            walls.append(listed_walls)
        rows, walls = np.concatenate(rows), np.concatenate(walls)
        order = np.argsort(rows, kind="stable")
        rows, self.list_walls = rows[order], walls[order].astype(np.int32)
        listed, start = np.unique(rows, return_index=True)
        self.list_start = np.append(start, len(rows))  # (lists + 1,)
        self.rows[listed] = np.arange(len(listed)) << CHAIN_BITS


class _RayBlock:
    """Ray rows for one block of cells. All arrays are (cells, S') pairs or (cells * BINS,) rows; S' = segments in reach.

    `radius` is a cell's circumscribed circle: a statement about "the cell" holds for every point of that disc.
    Bearings are counted in bins. A segment is `facing` if the whole cell is on its road side, `averted` if the whole cell
    is behind it, else `edge_on`. Where walls cross each other (a custom track with a very tight turn) there is no telling
    which side of a wall is the road: such a block is `tangled`, and all its rays go through lists of all walls, both sides.
    """

    MARGIN = 1e-6  # bins; errors of rounding are 1e-13, so a family is taken a hair too wide rather than too narrow

    def __init__(self, tables: Tables, centres):
        self.tables, self.centres, self.count = tables, centres, len(centres)
        self.radius = radius = CELL * math.sqrt(0.5) + 1e-6
        start, edge = tables.vertex[tables.real], tables.edge[tables.real]
        middle = centres.mean(0)
        reach = np.hypot(*(centres - middle).T).max()
        within = (RAY_RANGE + radius + reach) ** 2
        self.chosen = np.flatnonzero(_squared_to_segments(middle[None], start, edge)[0] < within)
        self.tangled = tables.crossing[self.chosen].any()
        (sx, sy), (ex, ey) = start[self.chosen].T, edge[self.chosen].T
        self.ex, self.ey = ex, ey
        ax, ay = sx - centres[:, :1], sy - centres[:, 1:]
        bx, by = ax + ex, ay + ey
        squared = ex**2 + ey**2
        self.cross = ax * by - ay * bx
        self.height = self.cross / np.sqrt(squared)  # signed distance of the centre from the segment's line
        share = np.clip(-(ax * ex + ay * ey) / squared, 0, 1)
        self.distance = np.hypot(ax + share * ex, ay + share * ey)
        self.from_a, self.from_b = np.hypot(ax, ay), np.hypot(bx, by)
        self.bearing_a = np.arctan2(ay, ax) / BIN
        self.bearing_b = np.arctan2(by, bx) / BIN
        self.nearest = np.maximum(self.distance - radius, 0)  # no ray of the cell meets the segment before this

    def build(self):
        """-> rows (cells * BINS,), and the lists of the other rows as pairs (row, wall)."""
        hit = self._hit_from_centres()
        obstacle = self._nearest_obstacle()
        first, length, farthest, closed, facing = self._chains(hit)
        limit = np.where(closed, np.minimum(farthest, RAY_RANGE), RAY_RANGE)
        if self.tangled:
            limit[:], closed[:] = RAY_RANGE, False
        simple = closed & facing & (length <= MAX_CHAIN) & (obstacle > limit)
        rows = np.where(simple, first << CHAIN_BITS | length, (self.tables.nothing << CHAIN_BITS) | 1)
        # The others: every segment that some ray of the family may meet before the chain that closes the view.
        listed = [self._possible_hits(self.height >= -self.radius, self.tables.real, 0.0, ~simple, limit)]
        if self.tangled:
            visible = self.height <= self.radius
            listed.append(self._possible_hits(visible, self.tables.mirrored, BINS / 2, ~simple, limit))
        return rows, *(np.concatenate(parts) for parts in zip(*listed, strict=True))

    def _possible_hits(self, visible, index, turned, wanted, limit):
        """Pairs (row, segment index) of the wanted rows: all segments that some ray of the family may meet before limit."""
        cell, j = np.nonzero(visible & (self.nearest < RAY_RANGE))
        which, row = self._spread(cell, *self._family_bins(cell, j, turned))
        keep = wanted[row] & (self.nearest[cell, j][which] < limit[row])
        return row[keep], index[self.chosen[j[which[keep]]]]

    @staticmethod
    def _spread(cell, low, high):
        """Bins low..high of each cell, one after the other. -> index into `cell`, row number."""
        low = np.ceil(low).astype(np.intp)
        count = np.clip(np.floor(high).astype(np.intp) - low + 1, 0, BINS)
        which = np.repeat(np.arange(len(cell)), count)
        step = np.arange(len(which)) - np.repeat(count.cumsum() - count, count)
        return which, cell[which] * BINS + (low[which] + step) % BINS

    def _hit_from_centres(self):
        """The first segment met by the ray from the cell's centre along the bin's centre, -1 for none. (rows,)"""
        cell, j = np.nonzero(self.cross > 0)
        low = self.bearing_a[cell, j] - 0.5
        high = low + (self.bearing_b - self.bearing_a)[cell, j] % BINS
        which, row = self._spread(cell, low - self.MARGIN, high + self.MARGIN)
        cell, j, angle = cell[which], j[which], (row % BINS + 0.5) * BIN
        t = self.cross[cell, j] / (np.cos(angle) * self.ey[j] - np.sin(angle) * self.ex[j])
        best = np.full(self.count * BINS, np.inf)
        np.minimum.at(best, row, t)
        hit = np.full(self.count * BINS, -1)
        first = t == best[row]
        hit[row[first]] = j[first]
        return hit

    def _family_bins(self, cell, j, turned=0.0):
        """The range of bins in which some ray of the cell can meet segment j: as bin numbers low, high."""
        spread_a = np.arcsin(np.minimum(self.radius / self.from_a[cell, j], 1)) / BIN
        spread_b = np.arcsin(np.minimum(self.radius / self.from_b[cell, j], 1)) / BIN
        a = self.bearing_a[cell, j]
        b = a + (self.bearing_b[cell, j] - a + BINS / 2) % BINS - BINS / 2
        low, high = np.minimum(a - spread_a, b - spread_b), np.maximum(a + spread_a, b + spread_b)
        # A segment that reaches into the cell can be met in every direction that points to its back.
        along = np.arctan2(self.ey[j], self.ex[j]) / BIN + turned
        inside = self.distance[cell, j] <= self.radius * (1 + 1e-9)
        low, high = np.where(inside, along - BINS / 2, low), np.where(inside, along, high)
        return np.floor(low - self.MARGIN), np.floor(high + self.MARGIN)

    def _nearest_obstacle(self):
        """How near anything may stand that could end a wall's view within the bin: edge-on segments, silhouettes. (rows,)

        Segments between such points only face the cell or only avert themselves; a wall made of those alone crosses the
        whole family or none of it, so the ray from the centre has seen it.
        """
        nearest = np.full(self.count * BINS, np.inf)
        side = (self.height > self.radius).astype(int) - (self.height < -self.radius)
        cell, j = np.nonzero((side == 0) & (self.nearest < RAY_RANGE))
        which, row = self._spread(cell, *self._family_bins(cell, j))
        np.minimum.at(nearest, row, self.nearest[cell, j][which])
        following = self.tables.following[self.chosen]
        place = np.minimum(np.searchsorted(self.chosen, following), len(self.chosen) - 1)
        cell, j = np.nonzero((side * side[:, place] == -1) & (self.chosen[place] == following))
        spread = np.arcsin(np.minimum(self.radius / self.from_b[cell, j], 1)) / BIN + self.MARGIN
        bearing = self.bearing_b[cell, j]
        which, row = self._spread(cell, np.floor(bearing - spread), np.floor(bearing + spread))
        np.minimum.at(nearest, row, np.maximum(self.from_b[cell, j] - self.radius, 0)[which])
        return nearest

    def _chains(self, hit):
        """Extend each hit along its wall, backward and forward, until both ends are outside the family. All (rows,)

        -> first vertex, number of segments, distance that none of it exceeds, whether both ends were found (so that no ray
        gets past), whether all segments are facing (so that bisection finds the right one).
        """
        tables, reach, rows = self.tables, (RAY_RANGE + self.radius) ** 2, np.flatnonzero(hit >= 0)
        count, edges = len(rows), np.arange(BINS + 1) * BIN
        walks = np.arange(2 * count)  # a walk backward from every row's hit, and then one forward
        forward = walks >= count
        (qx, qy), step = np.tile(self.centres[rows // BINS].T, 2), np.where(forward, 1, -1)
        bins = np.tile(rows % BINS, 2)
        low, high = edges[:-1] - self.MARGIN, edges[1:] + self.MARGIN
        low_x, low_y, high_x, high_y = (f(angle).take(bins) * step for angle in (low, high) for f in (np.cos, np.sin))
        vertex = np.tile(tables.real[self.chosen[hit[rows]]], 2) + forward
        far, facing, found = np.zeros(2 * count), np.ones(2 * count, bool), np.ones(2 * count, bool)
        for extension in range(MAX_CHAIN):
            here = vertex.take(walks)
            last = here - forward.take(walks)  # the segment that ends here
            x, y = tables.vertex_x.take(here) - qx.take(walks), tables.vertex_y.take(here) - qy.take(walks)
            normal_x, normal_y = tables.normal_x.take(last), tables.normal_y.take(last)
            squared = x * x + y * y
            far[walks] = np.maximum(far.take(walks), squared)
            facing[walks] &= normal_x * x + normal_y * y < -self.radius
            past_low = low_x.take(walks) * y - low_y.take(walks) * x
            past_high = high_x.take(walks) * y - high_y.take(walks) * x
            beyond = np.minimum(past_low, past_high) > self.radius
            # The chain also ends where the wall leaves the rays' range for good: what a ray would meet there, on the
            # segment or on its line prolonged, is out of range. (normal_y, -normal_x) is the segment's direction.
            leaving = (squared > reach) & ((x * normal_y - y * normal_x) * step.take(walks) > 0)
            walks = walks[~(beyond | leaving)]
            if not len(walks):
                break
            if extension + 1 < MAX_CHAIN:
                vertex[walks] += step.take(walks)
        found[walks] = False
        backward, forward = vertex.reshape(2, count)
        first = np.zeros(self.count * BINS, np.intp)
        length, farthest = np.zeros_like(first), np.zeros(len(first))
        closed, faced = np.zeros(len(first), bool), np.zeros(len(first), bool)
        first[rows], length[rows] = backward, forward - backward
        closed[rows], faced[rows] = found.reshape(2, count).all(0), facing.reshape(2, count).all(0)
        farthest[rows] = np.sqrt(far.reshape(2, count).max(0)) + self.radius
        return first, length, farthest, closed, faced


# == 4  World: the tables of all tracks in a batch, end to end, and what is asked of them every tick ===================


class World:
    """Several tracks as one set of arrays: every car carries the number of its track, and all questions take that number.

    `take(..., mode="clip")` stands where a garbage index may occur (a guess of NaN, a row that names a list): what it gives
    is replaced afterwards.
    """

    def __init__(self, tracks: Sequence[Track]):
        self.tracks = list(tracks)
        tables = [track.tables for track in self.tracks]

        def offsets(sizes):
            return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp)

        def joined(parts):
            return np.concatenate([np.asarray(part) for part in parts])

        # -- where is a car: grid of cells, subcells within them
        self.origin_x, self.origin_y = np.array([t.origin for t in tables]).T.copy()
        self.grid_width = np.array([t.width for t in tables], np.intp)
        self.last_column = np.array([t.width * SPLIT - 1.0 for t in tables])
        self.last_row = np.array([len(t.cell_of) // t.width * SPLIT - 1.0 for t in tables])
        self.grid_start = offsets([len(t.cell_of) for t in tables])
        cell_start = offsets([len(t.centres) + 1 for t in tables])
        self.cell_of = joined(t.cell_of + start for t, start in zip(tables, cell_start, strict=True)).astype(np.intp)
        self.guess_u, self.guess_ux, self.guess_uy = np.concatenate([t.guess for t in tables], axis=1)
        self.clearance = joined(t.clearance for t in tables)

        # -- the spline, with one segment more at each end (a guess may land a little outside of the loop)
        self.length = np.array([track.length for track in self.tracks])
        counts = [len(track.control_points) for track in self.tracks]
        self.segment_start = offsets([c + 2 for c in counts]) + 1
        one_more = ((0, 0), (1, 1), (0, 0))
        cubic = np.concatenate([np.pad(track.cubic, one_more, mode="wrap") for track in self.tracks], axis=1)
        self.cubic = list(cubic.transpose(2, 0, 1).reshape(8, -1))  # ax bx cx dx ay by cy dy
        padded = zip(*(self._padded_arc(track) for track in self.tracks), strict=True)
        self.arc, self.chord, self.width_at_0, self.width_slope = map(joined, padded)

        # -- samples 2 units apart, as in the game, for places that the tables do not know; one more at each end
        counts = [max(100, math.ceil(track.length / 2)) for track in self.tracks]
        self.sample_u = np.zeros((len(self.tracks), max(counts) + 2))
        self.sample_x, self.sample_y = np.full((2, len(self.tracks), max(counts)), np.inf)
        for i, (track, count) in enumerate(zip(self.tracks, counts, strict=True)):
            u = track.parameter(np.arange(count) * (track.length / count))
            self.sample_x[i, :count], self.sample_y[i, :count] = track.spline(u).T
            around = len(track.control_points)
            self.sample_u[i, : count + 2] = [u[-1] - around, *u, u[0] + around]

        # -- walls
        vertex_start = offsets([len(t.vertex) for t in tables])
        self.vertex_x, self.vertex_y = joined(t.vertex for t in tables).T.copy()
        self.edge_x, self.edge_y = joined(np.append(t.edge, [[1.0, 1.0]], axis=0) for t in tables).T.copy()
        self.edge_squared = self.edge_x**2 + self.edge_y**2
        self.normal_x, self.normal_y = joined(np.append(t.normal, [[0.0, 0.0]], axis=0) for t in tables).T.copy()
        self.offset = joined(np.append(t.offset, np.inf) for t in tables)
        widest = max(t.walls.shape[1] for t in tables)
        walls = [np.pad(t.walls, ((0, 0), (0, widest - t.walls.shape[1])), constant_values=t.nothing) for t in tables]
        self.walls = joined(w + start for w, start in zip(walls, vertex_start, strict=True))
        wall_list_start = offsets([len(t.walls) for t in tables])
        self.wall_list = joined(t.wall_list + np.int32(start) for t, start in zip(tables, wall_list_start, strict=True))

        # -- rays
        list_start = offsets([len(t.list_start) - 1 for t in tables])
        rows = []
        for t, vertex, first in zip(tables, vertex_start, list_start, strict=True):
            listed = t.rows & ((1 << CHAIN_BITS) - 1) == 0
            rows.append(t.rows + (np.where(listed, first, vertex) << CHAIN_BITS))
        self.rows = joined(rows).astype(np.int32)
        self.list_count = joined(np.diff(t.list_start) for t in tables)
        self.list_start = offsets(self.list_count)
        self.list_walls = joined(t.list_walls + np.int32(start) for t, start in zip(tables, vertex_start, strict=True))

        # -- gates, GATES per track
        self.gate_x, self.gate_y = joined(track.gate_inner for track in self.tracks).T.copy()
        gate = joined(track.gate_outer - track.gate_inner for track in self.tracks)
        self.gate_along_x, self.gate_along_y = gate.T.copy()
        self.gate_direction_x, self.gate_direction_y = joined(track.gate_direction for track in self.tracks).T.copy()

    @staticmethod
    def _padded_arc(track: Track):
        """Arc length and chord by chord number, half-width as a line in s by segment; one segment more at each end."""
        s, length = track.arc[:-1], track.length
        arc = np.concatenate([s[-CHORDS:] - length, s, s[:CHORDS] + length])
        chord = np.pad(np.diff(track.arc), CHORDS, mode="wrap")
        width = np.pad(track.control_points[:, 2], (1, 2), mode="wrap")
        knots = np.append(arc[::CHORDS], arc[-1] + chord[-1])
        slope = np.diff(width) / np.diff(knots)
        return arc, chord, width[:-1] - slope * knots[:-1], slope

    def locate(self, track, x, y):
        """Subcell number, and the position within the subcell, from -1/2 to 1/2."""
        across = (x - self.origin_x.take(track)) * (1 / SUBCELL)
        up = (y - self.origin_y.take(track)) * (1 / SUBCELL)
        column, row = np.floor(across), np.floor(up)
        across, up = across - column - 0.5, up - row - 0.5
        # Off the map counts as its edge, which no table covers.
        column = np.minimum(np.maximum(column, 0.0), self.last_column.take(track)).astype(np.intp)
        row = np.minimum(np.maximum(row, 0.0), self.last_row.take(track)).astype(np.intp)
        cell = (row // SPLIT) * self.grid_width.take(track) + column // SPLIT + self.grid_start.take(track)
        number = self.cell_of.take(cell)
        subcell = number * SPLIT**2 + (row % SPLIT) * SPLIT + column % SPLIT
        return subcell, across, up

    def project(self, track, x, y, located):
        """The nearest point of the centreline: its arc length in [0, L), its distance, the road's half-width there.

        The subcell's first-order guess, then one step of Newton's method, corrected for the change of slope (Chebyshev's
        method), on the spline itself. Where the step is large (near the centre of a tight turn), the place is searched for.
        """
        subcell, dx, dy = located
        u = self.guess_u.take(subcell) + self.guess_ux.take(subcell) * dx + self.guess_uy.take(subcell) * dy
        whole = np.floor(u)
        segment = whole.astype(np.intp) + self.segment_start.take(track)
        t = u - whole
        ax, bx, cx, dx, ay, by, cy, dy = (c.take(segment, mode="clip") for c in self.cubic)
        # p: from the car to the spline, q and r: the spline's first and second derivative
        px, py = ax + t * (bx + t * (cx + t * dx)) - x, ay + t * (by + t * (cy + t * dy)) - y
        t3 = 3.0 * t
        rx, ry = t3 * dx, t3 * dy
        qx, qy = cx + cx + rx, cy + cy + ry
        rx, ry = qx + rx, qy + ry
        qx, qy = bx + t * qx, by + t * qy
        slope = qx * qx + qy * qy
        bend = slope + px * rx + py * ry
        step = (px * qx + py * qy) / bend
        t = t - step * (1.0 + step * (1.5 * (qx * rx + qy * ry) + 3.0 * (px * dx + py * dy)) / bend)
        px, py = ax + t * (bx + t * (cx + t * dx)) - x, ay + t * (by + t * (cy + t * dy)) - y
        distance = np.sqrt(px * px + py * py)
        # Too long a step, into another segment, or none at all: two branches are about equally near.
        sure = (step * step * slope < LONGEST_STEP**2) & (np.abs(t - 0.5) < 0.5 + 0.0005 / CHORDS)
        if not sure.all():
            lost = (~sure).nonzero()[0]
            segment[lost], t[lost], distance[lost] = self._search(track[lost], x[lost], y[lost])
        t = t * CHORDS
        whole = np.minimum(np.maximum(np.floor(t), 0.0), CHORDS - 1.0)  # the segment's own chords, if t is outside
        chord = segment * CHORDS + whole.astype(np.intp)
        s = self.arc.take(chord, mode="clip") + (t - whole) * self.chord.take(chord, mode="clip")
        half_width = self.width_at_0.take(segment, mode="clip") + self.width_slope.take(segment, mode="clip") * s
        length = self.length.take(track)
        outside = (s < 1e-9) | (s >= length - 1e-9)
        if outside.any():
            over = s[outside]
            over = over + length[outside] * ((over < -1e-9) - (over >= length[outside] - 1e-9).astype(np.float64))
            s[outside] = np.where(np.abs(over) < 1e-9, 0.0, over)  # the start line is exactly 0, as in the game
        return s, distance, half_width

    def _search(self, track, x, y):
        """The nearest of samples 2 units apart, as in the game, then of ever finer ones around it. -> segment, t, distance"""
        car, start = np.arange(len(x)), self.segment_start[track, None]
        nearest = ((self.sample_x[track] - x[:, None]) ** 2 + (self.sample_y[track] - y[:, None]) ** 2).argmin(1)
        # sample_u has one more at its beginning
        low, high = self.sample_u[track, nearest], self.sample_u[track, nearest + 2]
        for count in (80, 100):
            u = low[:, None] + (high - low)[:, None] * (np.arange(count + 1) / count)  # (cars, count + 1)
            segment = np.floor(u).astype(np.intp)
            t = u - segment
            ax, bx, cx, dx, ay, by, cy, dy = (c.take(segment + start) for c in self.cubic)
            squared = (ax + t * (bx + t * (cx + t * dx)) - x[:, None]) ** 2
            squared += (ay + t * (by + t * (cy + t * dy)) - y[:, None]) ** 2
            best = squared.argmin(1)
            low, high = u[car, np.maximum(best - 1, 0)], u[car, np.minimum(best + 1, count)]
        return (segment + start)[car, best], t[car, best], np.sqrt(squared[car, best])

    def nearest_wall(self, subcell, x, y):
        """Distance and nearest point of the nearest wall, as far as WALL_TOUCH; beyond that the distance is just large."""
        wall = self.walls.take(self.wall_list.take(subcell), axis=0).T  # (walls of a list, N)
        start_x, start_y = self.vertex_x.take(wall), self.vertex_y.take(wall)
        edge_x, edge_y = self.edge_x.take(wall), self.edge_y.take(wall)
        dx, dy = x - start_x, y - start_y
        share = np.minimum(np.maximum((dx * edge_x + dy * edge_y) / self.edge_squared.take(wall), 0.0), 1.0)
        wall_x, wall_y = start_x + share * edge_x, start_y + share * edge_y
        dx, dy = x - wall_x, y - wall_y
        squared = dx * dx + dy * dy
        squared[self.offset.take(wall) == np.inf] = np.inf  # filled-up lists
        nearest = squared.argmin(0)
        car = np.arange(len(x))
        return np.sqrt(squared[nearest, car]), wall_x[nearest, car], wall_y[nearest, car]

    def cast_rays(self, subcell, x, y, heading):
        """Distance to the first wall along each ray, RAY_RANGE at most. -> (R, N)"""
        if len(x) > RAY_BLOCK:  # what is being worked on should stay in the processor's cache
            parts = (slice(i, i + RAY_BLOCK) for i in range(0, len(x), RAY_BLOCK))
            return np.concatenate([self.cast_rays(subcell[p], x[p], y[p], heading[p]) for p in parts], axis=1)
        cos, sin = np.cos(heading), np.sin(heading)
        dx, dy = cos * RAY_COS - sin * RAY_SIN, sin * RAY_COS + cos * RAY_SIN  # (R, N)
        bin_ = np.floor(heading * (1 / BIN)).astype(np.intp)
        row = self.rows.take((subcell // SPLIT**2) * BINS + ((bin_ + RAY_BINS) & (BINS - 1)))
        count = row & ((1 << CHAIN_BITS) - 1)
        segment = (row >> CHAIN_BITS).astype(np.intp)
        last = segment + (count - 1)
        # Bisection: the ray passes vertices on its right; it ends on the segment behind the last one it passes.
        across = x * dy - y * dx
        for half in CHAIN_HALVES:
            vertex = np.minimum(segment + half, last)
            vertex_x, vertex_y = self.vertex_x.take(vertex, mode="clip"), self.vertex_y.take(vertex, mode="clip")
            segment = np.where(vertex_x * dy - vertex_y * dx > across, vertex, segment)
        normal_x, normal_y = self.normal_x.take(segment, mode="clip"), self.normal_y.take(segment, mode="clip")
        ahead = self.offset.take(segment, mode="clip") - normal_x * x - normal_y * y
        # A line that is never met ahead (or "nothing", infinitely far) has an inverse distance of 0 or less.
        distance = 1.0 / np.maximum((normal_x * dx + normal_y * dy) / ahead, 1.0 / RAY_RANGE)
        if len(listed := np.flatnonzero(count == 0)):
            lists = row.reshape(-1)[listed] >> CHAIN_BITS
            distance.reshape(-1)[listed] = self._cast_listed(lists, listed, dx, dy, across, x, y)
        return distance

    def _cast_listed(self, lists, listed, dx, dy, across, x, y):
        """The same for rays that have to test every segment of a list: all pairs (ray, segment), then the nearest hit."""
        dx, dy, across = dx.reshape(-1).take(listed), dy.reshape(-1).take(listed), across.reshape(-1).take(listed)
        count = self.list_count.take(lists)
        stop = count.cumsum()
        ray = np.repeat(np.arange(len(lists)), count)
        place = np.arange(len(ray)) + (self.list_start.take(lists) - stop + count).take(ray)
        wall = self.list_walls.take(place).astype(np.intp)
        pair_dx, pair_dy, pair_across = dx.take(ray), dy.take(ray), across.take(ray)
        # A ray meets a segment that begins on its right and ends on its left.
        right = self.vertex_x.take(wall) * pair_dy - self.vertex_y.take(wall) * pair_dx >= pair_across
        wall_end = wall + 1
        left = self.vertex_x.take(wall_end) * pair_dy - self.vertex_y.take(wall_end) * pair_dx <= pair_across
        met = (right & left).nonzero()[0]
        ray, wall = ray.take(met), wall.take(met)
        car = listed.take(ray) % len(x)
        normal_x, normal_y = self.normal_x.take(wall), self.normal_y.take(wall)
        ahead = self.offset.take(wall) - normal_x * x.take(car) - normal_y * y.take(car)
        t = ahead / (normal_x * dx.take(ray) + normal_y * dy.take(ray))
        nearest = np.full(len(lists), RAY_RANGE)
        np.minimum.at(nearest, ray, np.where(t >= 0, t, RAY_RANGE))
        return nearest


RAY_BLOCK = 1024  # cars
RAY_COS, RAY_SIN = np.cos(RAY_ANGLES)[:, None], np.sin(RAY_ANGLES)[:, None]  # (R, 1)


# == 5  RacerSim: state, reset, step ===================================================================================


@functools.lru_cache(maxsize=8)
def _cached_world(tracks: tuple[Track, ...]) -> World:
    """Nothing in a World changes once it is made, so environments on the same tracks share one."""
    return World(tracks)


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
    # lap_ticks: how long the last whole lap took, 0 before there is one
    # track_mark: a checksum of the car's track, so that a state is not put back on another one
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
            raise ValueError(f"num_cars is {num_cars}; a simulation needs at least 1 car")
        if start not in STARTS:
            raise ValueError(f"unknown start {start!r}. Available: {', '.join(STARTS)}")
        if isinstance(tracks, str) or not tracks:
            raise ValueError(f"tracks must be a non-empty list of track names, got {tracks!r}")
        self.num_cars, self.start = num_cars, start
        self.config = DEFAULT_CONFIG if config is None else config
        self.world = _cached_world(tuple(load_track(track) for track in tracks))
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
            raise ValueError(f"this simulation state lacks {', '.join(missing)}; it was saved by something else")
        for name in self.STATE:
            value, own = np.asarray(state[name]), getattr(self, name)
            if value.shape != own.shape or value.dtype != own.dtype:
                found = f"{name!r} is {value.dtype} {value.shape}, this simulation has {own.dtype} {own.shape}"
                raise ValueError(f"simulation state {found}; put it into one with the same number of cars")
        if not all(np.array_equal(state[name], getattr(self, name)) for name in ("track", "track_mark")):
            raise ValueError("simulation state is of other tracks than this simulation drives on")
        for name in self.STATE:
            setattr(self, name, np.array(state[name]))

    def seed_cars(self, cars, seeds) -> None:
        """A car's random numbers depend on its own seed only, not on who drives beside it. None leaves its stream as it is."""
        self.random_state = self.random_state.copy()
        for car, seed in zip(cars, seeds, strict=True):
            if seed is not None:  # scrambled, so that neighbouring seeds give distant streams
                self.random_state[car] = _scramble(np.array([int(seed) % 2**64], np.uint64)).view(np.int64)[0]

    def _random(self, cars):
        """The next uniform number in [0, 1) of each car (splitmix64)."""
        state = self.random_state[cars].view(np.uint64) + np.uint64(SPLITMIX_STEP)
        self.random_state[cars] = state.view(np.int64)
        return (_scramble(state) >> np.uint64(11)) / 2.0**53

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
            edges = (np.interp(s, t.wall_s, edge, period=t.length) for edge in (t.road_left, t.road_right))
            left, right = (np.maximum(edge, 0.0) for edge in edges)
            lateral = lateral * np.where(lateral > 0, left, right)
            tangent = t.tangent(s)
            normal = np.stack([-tangent[:, 1], tangent[:, 0]], axis=1)
            centre = t.position(s)
            place = centre + lateral[:, None] * normal
            located = self.world.locate(track[on], *place.T)[0]
            # Smoothed walls may cut a tight corner: start in the middle.
            blocked = self.world.clearance[located] < WALL_TOUCH
            x[on], y[on] = np.where(blocked[:, None], centre, place).T
            heading[on] = np.arctan2(tangent[:, 1], tangent[:, 0]) + (2 * turn[on] - 1) * ANYWHERE_HEADING
        self.place(cars, x, y, heading, speed * ANYWHERE_SPEED)

    def place(self, cars, x, y, heading, speed=0.0) -> None:
        """Put cars somewhere, driving straight ahead: next gate, the first one ahead; first lap, the next whole one."""
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

    def step(self, actions, observe: bool = True):
        """One tick for all cars. actions (N, 3): steer in [-1, 1], throttle and brake in [0, 1]; clamped as in the game.

        -> observations (None without `observe`, which saves half the time), rewards, terminated, truncated
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
            return self._observe(located[0], slice(None)) if observe else None, rewards, terminated, truncated

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
        """Observations of the given cars (indices; default all) as they stand. (n, 14)"""
        cars = np.arange(self.num_cars) if cars is None else cars
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            subcell = self.world.locate(self.track[cars], self.x[cars], self.y[cars])[0]
            return self._observe(subcell, cars)

    def _observe(self, subcell, cars) -> np.ndarray:
        observations = np.empty((len(subcell), OBS_SIZE))
        rays = self.world.cast_rays(subcell, self.x[cars], self.y[cars], self.heading[cars])
        np.multiply(rays.T, 1 / RAY_RANGE, out=observations[:, :NUM_RAYS])
        observations[:, 9] = self.speed[cars] * (1 / MAX_SPEED)
        observations[:, 10] = np.minimum(np.maximum(self.yaw_rate[cars] * (1 / MAX_YAW_RATE), -1.0), 1.0)
        observations[:, 11] = self.steer[cars]
        observations[:, 12] = self.s[cars] / self.world.length.take(self.track[cars])
        observations[:, 13] = np.minimum(self.centre_distance[cars] * (1 / CENTRELINE_RANGE), 1.0)
        return observations
