"""The tables of all tracks of a batch, end to end, and the questions asked of them in every tick. A first reader may skip this.

    locate        which subcell is this place in?
    project       where along the track is it, how far from the centreline, how wide is the road there?
    nearest_wall  how far is the nearest wall?
    cast_rays     how far can the car look in nine directions?

Every car carries the number of its track. `take(..., mode="clip")` stands where a garbage index may occur (a guess of NaN, a
row that names a list): what it gives is replaced afterwards. Shapes: N cars, R = 9 rays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from racer.game.ray_tables import BIN, BINS, CHAIN_BITS, CHAIN_HALVES, RAY_BINS, RayTables
from racer.game.rules import CHORDS, RAY_ANGLES, RAY_RANGE
from racer.game.tables import SPLIT, SUBCELL, Tables
from racer.game.track import Track

LONGEST_STEP = 0.35  # units; a guess that needs a larger correction is not trusted
RAY_BLOCK = 1024  # cars whose rays are cast at a time, so that the arrays stay in the processor's cache
RAY_COS, RAY_SIN = np.cos(RAY_ANGLES)[:, None], np.sin(RAY_ANGLES)[:, None]  # (R, 1)


@functools.lru_cache(maxsize=3)  # 10 MB each
def tables_of(track: Track) -> tuple[Tables, RayTables]:
    tables = Tables(track)
    return tables, RayTables(tables)


@functools.lru_cache(maxsize=3)  # 10 MB a track
def world_of(tracks: tuple[Track, ...]) -> World:
    """A World is never modified once it is made, so environments on the same tracks share one."""
    return World(tracks)


class World:
    """Several tracks as one set of arrays."""

    def __init__(self, tracks: Sequence[Track]):
        self.tracks = list(tracks)
        tables, rays = zip(*map(tables_of, self.tracks), strict=True)
        self._join_cells(tables)
        self._join_splines()
        self._sample_centrelines()
        vertex_start = self._join_walls(tables)
        self._join_rays(rays, vertex_start)
        # -- gates, GATES per track
        self.gate_x, self.gate_y = _joined(track.gate_inner for track in self.tracks).T.copy()
        gate = _joined(track.gate_outer - track.gate_inner for track in self.tracks)
        self.gate_along_x, self.gate_along_y = gate.T.copy()
        self.gate_direction_x, self.gate_direction_y = _joined(track.gate_direction for track in self.tracks).T.copy()

    def _join_cells(self, tables) -> None:
        self.origin_x, self.origin_y = np.array([t.origin for t in tables]).T.copy()
        self.grid_width = np.array([t.width for t in tables], np.intp)
        self.last_column = np.array([t.width * SPLIT - 1.0 for t in tables])
        self.last_row = np.array([len(t.cell_of) // t.width * SPLIT - 1.0 for t in tables])
        self.grid_start = _offsets([len(t.cell_of) for t in tables])
        cell_start = _offsets([len(t.centres) + 1 for t in tables])
        self.cell_of = _joined(t.cell_of + start for t, start in zip(tables, cell_start, strict=True)).astype(np.intp)
        self.guess_u, self.guess_ux, self.guess_uy = np.concatenate([t.guess for t in tables], axis=1)
        self.clearance = _joined(t.clearance for t in tables)

    def _join_splines(self) -> None:
        """With one more segment at each end, since a guess may land a little outside of the loop."""
        self.length = np.array([track.length for track in self.tracks])
        self.segment_start = _offsets([len(track.control_points) + 2 for track in self.tracks]) + 1
        one_more = ((0, 0), (1, 1), (0, 0))
        cubic = np.concatenate([np.pad(track.cubic, one_more, mode="wrap") for track in self.tracks], axis=1)
        self.cubic = list(cubic.transpose(2, 0, 1).reshape(8, -1))  # ax bx cx dx ay by cy dy
        padded = zip(*(self._padded_arc(track) for track in self.tracks), strict=True)
        self.arc, self.chord, self.width_at_0, self.width_slope = map(_joined, padded)

    def _sample_centrelines(self) -> None:
        """Samples 2 units apart, as in the game, for places where the tables have no guess; one more at each end."""
        counts = [max(100, math.ceil(track.length / 2)) for track in self.tracks]
        self.sample_u = np.zeros((len(self.tracks), max(counts) + 2))
        self.sample_x, self.sample_y = np.full((2, len(self.tracks), max(counts)), np.inf)
        for i, (track, count) in enumerate(zip(self.tracks, counts, strict=True)):
            u = track.parameter(np.arange(count) * (track.length / count))
            self.sample_x[i, :count], self.sample_y[i, :count] = track.spline(u).T
            around = len(track.control_points)
            self.sample_u[i, : count + 2] = [u[-1] - around, *u, u[0] + around]

    def _join_walls(self, tables) -> np.ndarray:
        """-> where each track's vertices begin"""
        vertex_start = _offsets([len(t.vertex) for t in tables])
        self.vertex_x, self.vertex_y = _joined(t.vertex for t in tables).T.copy()
        self.edge_x, self.edge_y = _joined(np.append(t.edge, [[1.0, 1.0]], axis=0) for t in tables).T.copy()
        self.edge_squared = self.edge_x**2 + self.edge_y**2
        self.normal_x, self.normal_y = _joined(np.append(t.normal, [[0.0, 0.0]], axis=0) for t in tables).T.copy()
        self.offset = _joined(np.append(t.offset, np.inf) for t in tables)
        widest = max(t.walls.shape[1] for t in tables)
        walls = [np.pad(t.walls, ((0, 0), (0, widest - t.walls.shape[1])), constant_values=t.nothing) for t in tables]
        self.walls = _joined(w + start for w, start in zip(walls, vertex_start, strict=True))
        wall_list_start = _offsets([len(t.walls) for t in tables])
        self.wall_list = _joined(t.wall_list + np.int32(start) for t, start in zip(tables, wall_list_start, strict=True))
        return vertex_start

    def _join_rays(self, rays, vertex_start) -> None:
        list_start = _offsets([len(r.list_start) - 1 for r in rays])
        rows = []
        for r, vertex, first in zip(rays, vertex_start, list_start, strict=True):
            listed = r.rows & ((1 << CHAIN_BITS) - 1) == 0
            rows.append(r.rows + (np.where(listed, first, vertex) << CHAIN_BITS))
        self.rows = _joined(rows).astype(np.int32)
        self.list_count = _joined(np.diff(r.list_start) for r in rays)
        self.list_start = _offsets(self.list_count)
        self.list_walls = _joined(r.list_walls + np.int32(start) for r, start in zip(rays, vertex_start, strict=True))

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
        # Not trusted: a long step, one into another segment, or no guess, where two stretches are about equally near.
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
        if len(x) > RAY_BLOCK:
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
        # A ray crosses a segment that begins on its right and ends on its left, or the other way round, seen from behind.
        right = self.vertex_x.take(wall) * pair_dy - self.vertex_y.take(wall) * pair_dx >= pair_across
        wall_end = wall + 1
        left = self.vertex_x.take(wall_end) * pair_dy - self.vertex_y.take(wall_end) * pair_dx <= pair_across
        met = (right == left).nonzero()[0]
        ray, wall = ray.take(met), wall.take(met)
        car = listed.take(ray) % len(x)
        normal_x, normal_y = self.normal_x.take(wall), self.normal_y.take(wall)
        ahead = self.offset.take(wall) - normal_x * x.take(car) - normal_y * y.take(car)
        t = ahead / (normal_x * dx.take(ray) + normal_y * dy.take(ray))
        nearest = np.full(len(lists), RAY_RANGE)
        np.minimum.at(nearest, ray, np.where(t >= 0, t, RAY_RANGE))
        return nearest


def _offsets(sizes) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp)


def _joined(parts) -> np.ndarray:
    return np.concatenate([np.asarray(part) for part in parts])
