"""Lookup tables of a track: where along the centreline is this place, and which walls are near it? A first reader may skip this.

The track is covered by square cells of CELL units, and each cell by SPLIT x SPLIT subcells:

    +-----------+-----------+      A subcell knows the spline parameter u nearest to its centre and the gradient of u,
    | . . . . . | . . . . . |      so that "where along the track?" takes one linear guess and one correction step,
    | . . x . . |===========|      and it knows the walls within WALL_TOUCH, and a lower bound of the distance to any wall.
    | . . . . . | . . . . . |
    +-----------+-----------+      x: a car, =: a wall. (What a ray from a cell can hit is in ray_tables.py.)

Cells cover the road between the walls and one cell around it. Cell 0 stands for everywhere else; it is exact but slow.
Building the tables takes about 0.2 s and 10 MB per track.
"""

from __future__ import annotations

import math

import numpy as np

from racer.game.rules import WALL_TOUCH
from racer.game.track import Track, squared_distances, squared_to_segments

CELL = 12.0
SPLIT = 6
SUBCELL = CELL / SPLIT
CELL_RADIUS, SUBCELL_RADIUS = CELL * math.sqrt(0.5), SUBCELL * math.sqrt(0.5)
BLOCK = 7  # tables are built for BLOCK x BLOCK cells at a time
OVERLAP = 20  # vertices stored beyond the ends of the closed walls, so that a ray's chain of segments never wraps
SAMPLE_SPACING = 2.0  # units between the centreline samples that guesses are made from
LEAST_BEND = 0.2  # closer to a centre of curvature than this share of its radius, the projection is searched for


class Tables:
    """Cells, walls and subcells of one track."""

    def __init__(self, track: Track):
        self._index_cells(track)
        self._index_walls(track)
        self._build_subcells(track)

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
        """Wall vertices, with overlap at both ends; segment j runs from vertex j to j + 1. The last segment is out of reach."""
        lines = [np.pad(line, ((OVERLAP, OVERLAP + 1), (0, 0)), mode="wrap") for line in (track.outer, track.inner)]
        self.vertex = np.concatenate([*lines, np.zeros((2, 2))])
        n = len(track.outer)
        self.real = (np.arange(2)[:, None] * len(lines[0]) + OVERLAP + np.arange(n)).ravel()  # (S,) one index per segment
        self.following = np.concatenate([np.roll(np.arange(n), -1), n + np.roll(np.arange(n), -1)])
        self.edge = edge = np.diff(self.vertex, axis=0)
        self.nothing = len(edge) - 1
        nowhere = [*(np.cumsum([len(line) for line in lines]) - 1), self.nothing]  # also the joints between lines
        edge[nowhere] = 1.0
        # Normals point to the left, which is the road.
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
            to_middle = np.sqrt(squared_to_segments(middle[None], start, edge)[0])
            chosen = np.flatnonzero(to_middle <= max(to_middle.min(), WALL_TOUCH + SUBCELL) + 2 * reach)
            nearby = (points - middle, start[chosen] - middle, edge[chosen])
            squared = squared_to_segments(*(np.float32(array) for array in nearby))
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
        far = np.sqrt(squared_distances(np.float32(points - middle), np.float32(samples[chosen] - middle)))
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
