"""A track: control points -> centreline, walls, gates.

A track is a closed list of control points (x, y, half-width). A spline through them is the centreline; the walls stand beside
the road, and 30 gates cross it. `Track` builds these in this order and refuses a track that no car could drive on.

Shapes: C control points, S wall segments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from racer.game.checks import UserError, is_finite
from racer.game.rules import CHORDS, GATES, MIN_OFFSET, RUNOFF_WIDTH, WALL_TOUCH

MIN_CONTROL_POINTS, MAX_CONTROL_POINTS = 4, 500
MAX_HALF_WIDTH = 200.0  # units
MAX_EXTENT = 5_000.0  # units from the origin; the lookup tables of a larger track would take minutes and gigabytes


class Track:
    """The geometry of one closed track.

    centreline  spline(u) with u = control segment + t; arc length s is the sum of CHORDS chords per segment
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

    # -- centreline ----------------------------------------------------------------------------------------------------

    def _build_spline(self) -> None:
        """Centripetal Catmull-Rom as one cubic per segment, and the arc-length table over CHORDS chords per segment."""
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

    def project(self, points):
        """The nearest points of the centreline to points (n, 2): arc lengths in [0, L) and distances (n,).

        For a lap or a few places. (Cars in motion ask `World.project`, which is fast.)
        """
        count, around = math.ceil(self.length / 2), len(self.control_points)
        samples_u = self.parameter(np.arange(count) * self.length / count)
        samples = self.spline(samples_u)
        nearest = np.array([int(squared_distances(p[None], samples).argmin()) for p in points])
        low, high = samples_u[nearest - 1], samples_u[(nearest + 1) % count]
        low, high = np.where(nearest == 0, low - around, low), np.where(nearest == count - 1, high + around, high)
        for _ in range(48):  # bisection: the centreline leads toward the point before the nearest place, and away after it
            middle = (low + high) / 2
            place, along, _ = self.spline_with_derivatives(np.mod(middle, around))
            before = ((place - points) * along).sum(1) < 0
            low, high = np.where(before, middle, low), np.where(before, high, middle)
        u = np.mod(low, around)
        s = np.interp(u * CHORDS, np.arange(len(self.arc)), self.arc)
        return np.where(self.length - s < 1e-9, 0.0, s), np.hypot(*(self.spline(u) - points).T)

    def road(self, s):
        """The centreline (n, 2), its normals to the left (n, 2), and how far the road reaches to the left and to the right (n,)."""
        tangent = self.tangent(s)
        normal = np.stack([-tangent[:, 1], tangent[:, 0]], axis=1)
        left, right = (np.interp(s, self.wall_s, w, period=self.length) for w in (self.road_left, self.road_right))
        return self.position(s), normal, left, right

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

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_road(self) -> None:
        """A car must be able to follow the centreline once around, without touching a wall; walls must not cross."""
        tangent = self.tangent(np.arange(math.ceil(self.length / 2)) * 2.0)
        angle = np.arctan2(tangent[:, 1], tangent[:, 0])
        turned = np.mod(np.diff(angle, append=angle[0]) + math.pi, 2 * math.pi) - math.pi
        laps = round(abs(float(turned.sum())) / (2 * math.pi))
        if laps > 1:
            raise UserError(f"track {self.name!r}: the control points run around {laps} times; list each point once")
        centre, clearance = self._clearance()
        worst = int(clearance.argmin())
        if not clearance[worst] > WALL_TOUCH:
            found = f"a wall comes within {clearance[worst]:.2f} units of the centreline at {_show(centre[worst].round())}"
            self._refuse("the walls leave no road", centre[worst], f"{found}, a car needs more than {WALL_TOUCH:g}")
        start, edge = wall_segments(self)
        crossing = np.flatnonzero(crossing_segments(start, edge))
        if len(crossing):
            place = start[crossing[0]]
            self._refuse("the walls cross", place, f"two wall segments cross at {_show(place.round())}")

    def _clearance(self):
        """Points of the centreline 4 units apart (n, 2), and their distance to the nearest wall (n,)."""
        centre = self.position(np.arange(math.ceil(self.length / 4)) * 4.0)
        slices = (centre[i : i + 64] for i in range(0, len(centre), 64))  # 64 x some 500 distances at a time
        segments = wall_segments(self)
        return centre, np.sqrt(np.concatenate([squared_to_segments(p, *segments).min(1) for p in slices]))

    def check_width(self) -> None:
        """Refuse a road that is much wider than the room between the walls. The engine can drive there, but nobody means that."""
        centre, clearance = self._clearance()
        _, _, left, right = self.road(np.arange(len(centre)) * 4.0)
        worst = int((clearance / np.minimum(left, right)).argmin())
        if clearance[worst] < 0.5 * min(left[worst], right[worst]):
            found = f"a wall stands {clearance[worst]:.0f} units from the centreline at {_show(centre[worst].round())}"
            self._refuse("a wall crosses the road", centre[worst], found)

    def _refuse(self, problem: str, place, found: str) -> None:
        point = int(np.hypot(*(self.control_points[:, :2] - place).T).argmin())
        raise UserError(
            f"track {self.name!r}: {problem} near control point {point} {_show(self.control_points[point])}: {found}. "
            f"The turn is too tight, or two parts of the track are too close (walls stand {RUNOFF_WIDTH:g} units outside the "
            "road): move the points apart, widen the turn, or make the road narrower."
        )


def check_control_points(name: str, control_points) -> np.ndarray:
    """Control points as a (C, 3) array, or a UserError that says which point is wrong and why."""
    if not isinstance(control_points, (list, tuple, np.ndarray)):
        found = type(control_points).__name__
        raise UserError(f"track {name!r}: control_points must be a list of [x, y, half_width], got {found}")
    found = f"track {name!r}: {len(control_points)} control points"
    if len(control_points) < MIN_CONTROL_POINTS:
        raise UserError(f"{found}; a closed track needs at least {MIN_CONTROL_POINTS}")
    if len(control_points) > MAX_CONTROL_POINTS:
        limit = f"the engine takes {MAX_CONTROL_POINTS} at most"
        raise UserError(f"{found}; {limit}. The spline is smooth: take every other one")
    for i, point in enumerate(control_points):
        label = f"track {name!r}: control point {i}"
        if not isinstance(point, (list, tuple, np.ndarray)) or len(point) != 3:
            raise UserError(f"{label} is {point!r}; each point is [x, y, half_width]")
        if not all(is_finite(v) for v in point):
            raise UserError(f"{label} {list(point)!r} has a value that is not a finite number")
        label += f" {_show(point)}"
        if point[2] <= 0:
            raise UserError(f"{label} has half-width {point[2]:g}; it must be greater than 0")
        if point[2] > MAX_HALF_WIDTH:
            raise UserError(f"{label} has half-width {point[2]:g}; the engine takes {MAX_HALF_WIDTH:g} at most")
        if max(abs(point[0]), abs(point[1])) > MAX_EXTENT:
            raise UserError(f"{label} lies outside +-{MAX_EXTENT:g} units, the largest track the engine takes")
        other = (i + 1) % len(control_points)
        if tuple(point[:2]) == tuple(control_points[other][:2]):
            raise UserError(f"{label} is at the same place as point {other}; remove one (the loop closes by itself)")
    return np.array(control_points, dtype=np.float64)


def _show(point) -> str:
    return "(" + ", ".join(f"{v:g}" for v in point) + ")"


def _circular_mean(values, reach: int):
    """Box filter of 2 reach + 1 samples around a closed line."""
    return np.convolve(np.pad(values, reach, mode="wrap"), np.ones(2 * reach + 1), "valid") / (2 * reach + 1)


def _signed_area(line) -> float:
    (x, y), (x1, y1) = line.T, np.roll(line, -1, 0).T
    return float((x * y1 - x1 * y).sum() / 2)


def squared_distances(points, others):
    return (points[:, None, 0] - others[:, 0]) ** 2 + (points[:, None, 1] - others[:, 1]) ** 2


def wall_segments(track: Track):
    """All wall segments as start (S, 2) and edge vector (S, 2): the outer wall's, then the inner wall's."""
    start = np.concatenate([track.outer, track.inner])
    return start, np.concatenate([np.roll(track.outer, -1, 0), np.roll(track.inner, -1, 0)]) - start


def crossing_segments(start, edge):
    """Which segments cross another one that is not their neighbour. (S,) bool"""
    middle, half = start + edge / 2, np.hypot(*edge.T) / 2
    pairs = []
    for first in range(0, len(start), 256):  # 256 x S pairs at a time
        some = slice(first, first + 256)
        i, j = np.nonzero(squared_distances(middle[some], middle) <= (half[some, None] + half) ** 2)
        pairs.append(np.stack([i + first, j])[:, i + first < j])
    i, j = np.concatenate(pairs, axis=1)
    (ex, ey), (fx, fy), (wx, wy) = edge[i].T, edge[j].T, (start[j] - start[i]).T
    det = ex * fy - ey * fx
    with np.errstate(divide="ignore", invalid="ignore"):
        t, u = (wx * fy - wy * fx) / det, (wx * ey - wy * ex) / det
    inner = 1e-9  # neighbours share an end point and no more
    crossed = (t > inner) & (t < 1 - inner) & (u > inner) & (u < 1 - inner)
    return np.isin(np.arange(len(start)), np.concatenate([i[crossed], j[crossed]]))


def squared_to_segments(points, start, edge):
    """The squared distance of every point (P, 2) to every segment (S, 2). -> (P, S), in the precision of what is given"""
    (px, py), (sx, sy), (ex, ey) = points.T, start.T, edge.T
    x, y = px[:, None] - sx, py[:, None] - sy
    share = np.minimum(np.maximum((x * ex + y * ey) / (ex * ex + ey * ey), 0), 1)
    x -= share * ex
    y -= share * ey
    return x * x + y * y
