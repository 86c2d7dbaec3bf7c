"""Lookup tables of a track: which wall can a ray from here hit first? A first reader may skip this.

All rays that start in one cell (tables.py) and point into one of BINS direction bins are a *family*:

           wall ___________.--------        As a rule a family ends on one stretch of one wall with nothing in front of it:
                .  a  b  c  .               a *chain* of neighbouring segments a, b, c. Seen from the road, the bearing of a
                 .    ^    .                wall's vertices grows along the line, so bisection over the chain's vertices
                  +-------+                 finds the segment that a ray hits, exactly.
                  | cell  |                 Where the family can also meet something else (a corner that hides the wall
                  +-------+                 behind it), the row names a *list* of all segments that may be hit first, and
                                            the ray tests each.

A row is `first << CHAIN_BITS | length` for a chain, and `number << CHAIN_BITS` (length 0) for a list.
"""

from __future__ import annotations

import math

import numpy as np

from racer.game.rules import RAY_ANGLES, RAY_RANGE
from racer.game.tables import CELL_RADIUS, Tables
from racer.game.track import squared_to_segments

BINS = 64  # direction bins; the 22.5 degrees between rays are exactly 4 of them
BIN = 2 * math.pi / BINS
RAY_BINS = np.rint(RAY_ANGLES / BIN).astype(np.intp)[:, None]  # (R, 1)
MAX_CHAIN = 16  # segments in a chain; less than OVERLAP in tables.py
CHAIN_HALVES = (8, 4, 2, 1)
CHAIN_BITS = 5


class RayTables:
    """A row for every cell and direction bin, and the lists that some of the rows name."""

    def __init__(self, tables: Tables):
        self.rows = np.zeros((len(tables.centres) + 1) * BINS, np.int32)  # cell 0: list 0, which has every wall
        rows, walls = [np.zeros(len(tables.real), np.intp)], [tables.real]
        for first, stop in tables.blocks:
            block_rows, listed_rows, listed_walls = _RayBlock(tables, tables.centres[first:stop]).build()
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
    Bearings are counted in bins. A segment is `facing` if all of the cell is on its road side, `averted` if all of it
    is behind it, else `edge_on`.
    """

    MARGIN = 1e-6  # bins; errors of rounding are 1e-13, so a family is taken a hair too wide rather than too narrow

    def __init__(self, tables: Tables, centres):
        self.tables, self.centres, self.count = tables, centres, len(centres)
        self.radius = radius = CELL_RADIUS + 1e-6
        start, edge = tables.vertex[tables.real], tables.edge[tables.real]
        middle = centres.mean(0)
        reach = np.hypot(*(centres - middle).T).max()
        within = (RAY_RANGE + radius + reach) ** 2
        self.chosen = np.flatnonzero(squared_to_segments(middle[None], start, edge)[0] < within)
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
        """-> rows (cells * BINS,), and the lists of those that are no chains as pairs (row, wall)."""
        hit = self._hit_from_centres()
        obstacle = self._nearest_obstacle()
        first, length, farthest, closed, facing, leaves = self._chains(hit)
        limit = np.where(closed, np.minimum(farthest, RAY_RANGE), RAY_RANGE)
        simple = closed & facing & (length <= MAX_CHAIN) & (obstacle > limit)
        simple[simple] = ~self._hits_beside(simple & leaves, first, length)[simple]
        rows = np.where(simple, first << CHAIN_BITS | length, (self.tables.nothing << CHAIN_BITS) | 1)
        return rows, *self._possible_hits(~simple, limit)

    def _possible_hits(self, wanted, limit):
        """Pairs (row, wall) of the wanted rows: all segments that some ray of the family may meet before limit."""
        cell, j = np.nonzero((self.height >= -self.radius) & (self.nearest < RAY_RANGE))
        which, row = self._spread(cell, *self._family_bins(cell, j))
        keep = wanted[row] & (self.nearest[cell, j][which] < limit[row])
        return row[keep], self.tables.real[self.chosen[j[which[keep]]]]

    def _hits_beside(self, wanted, first, length):
        """Which of the wanted rows may hit a segment in range that is not in their chain. (rows,)"""
        row, wall = self._possible_hits(wanted, np.full(len(wanted), RAY_RANGE))
        line, around = len(self.tables.vertex) // 2 - 1, len(self.tables.real) // 2
        beside = (wall // line != first[row] // line) | ((wall - first[row]) % around >= length[row])
        result = np.zeros(len(wanted), bool)
        result[row[beside]] = True
        return result

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

    def _family_bins(self, cell, j):
        """The range of bins in which some ray of the cell can meet segment j: as bin numbers low, high."""
        spread_a = np.arcsin(np.minimum(self.radius / self.from_a[cell, j], 1)) / BIN
        spread_b = np.arcsin(np.minimum(self.radius / self.from_b[cell, j], 1)) / BIN
        a = self.bearing_a[cell, j]
        b = a + (self.bearing_b[cell, j] - a + BINS / 2) % BINS - BINS / 2
        low, high = np.minimum(a - spread_a, b - spread_b), np.maximum(a + spread_a, b + spread_b)
        # A segment that reaches into the cell can be met in every direction that points to its back.
        along = np.arctan2(self.ey[j], self.ex[j]) / BIN
        inside = self.distance[cell, j] <= self.radius * (1 + 1e-9)
        low, high = np.where(inside, along - BINS / 2, low), np.where(inside, along, high)
        return np.floor(low - self.MARGIN), np.floor(high + self.MARGIN)

    def _nearest_obstacle(self):
        """How near anything may stand that could end a wall's view within the bin: edge-on segments, silhouettes. (rows,)

        Segments between such points only face the cell or only avert themselves; a wall made of those alone crosses the
        entire family or none of it, so the ray from the centre has seen it.
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
        gets past), whether all segments are facing (so that bisection finds the right one), whether it ends where the wall
        leaves the rays' range (from where it may come back).
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
        far, leaves = np.zeros(2 * count), np.zeros(2 * count, bool)
        facing, found = np.ones(2 * count, bool), np.ones(2 * count, bool)
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
            # The chain also ends where the wall leaves the rays' range: what a ray would meet there, on the segment or on its
            # line prolonged, is out of range. (normal_y, -normal_x) is the segment's direction.
            leaving = (squared > reach) & ((x * normal_y - y * normal_x) * step.take(walks) > 0)
            leaves[walks] = leaving & ~beyond
            walks = walks[~(beyond | leaving)]
            if not len(walks):
                break
            if extension + 1 < MAX_CHAIN:
                vertex[walks] += step.take(walks)
        found[walks] = False
        backward, forward = vertex.reshape(2, count)
        farthest = np.sqrt(far.reshape(2, count).max(0)) + self.radius
        ends = found.reshape(2, count).all(0), facing.reshape(2, count).all(0), leaves.reshape(2, count).any(0)
        return tuple(self._per_row(rows, values) for values in (backward, forward - backward, farthest, *ends))

    def _per_row(self, rows, values):
        """Values of some rows, 0 in the others."""
        result = np.zeros(self.count * BINS, values.dtype)
        result[rows] = values
        return result
