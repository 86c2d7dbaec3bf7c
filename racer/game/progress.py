"""Progress along the shortest line, which training rewards instead of progress along the centreline.

What a tick is worth is how much shorter the rest of the lap has become. Along the centreline, a car that swings out before a turn
is paid nothing for it until it has cut the turn; along the shortest line every tick is paid at once. Both are differences of a
potential and a lap pays 1 with either, so the best driver stays the same (Ng et al. 1999), but it can be found with a shorter
horizon, and noise costs less.

A car beside point p of the line, which lies l along it in direction u, has come l + (position - p) . u; between two points of
the line this is interpolated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from racer.game.limit import shortest_line
from racer.game.track import Track
from racer.game.tracks import load_track

PROGRESS = ("centreline", "line")


class LineProgress:
    """How far N cars are along the shortest lines of their tracks, in laps."""

    def __init__(self, track_ids: Sequence[str], weight: float):
        distinct, number = np.unique(track_ids, return_inverse=True)
        tracks = [load_track(str(track_id)) for track_id in distinct]
        rows = [_rows(track) for track in tracks]  # equally many for every track
        self.rows, size = np.concatenate(rows), len(rows[0])
        self.first = number * size
        self.per_unit = (size - 1) / np.array([track.length for track in tracks])[number]
        self.weight, self.laps = weight, np.zeros(len(track_ids))

    def at(self, s, x, y, cars=slice(None)) -> np.ndarray:
        """Of cars at arc positions s and places x, y: how many laps along the line."""
        place = s * self.per_unit[cars]
        point = place.astype(np.intp)
        now, change = self.rows.take(self.first[cars] + point, axis=0).T.reshape(2, 3, -1)
        base, along_x, along_y = now + change * (place - point)
        return base + along_x * x + along_y * y

    def on_reset(self, cars, s, x, y) -> None:
        self.laps[cars] = self.at(s, x, y, cars)

    def gain(self, s, x, y) -> np.ndarray:
        """The reward for the progress since the last call (N,)."""
        laps = self.at(s, x, y)
        gained = laps - self.laps
        self.laps = laps
        return (gained - np.rint(gained)) * self.weight


def _rows(track: Track) -> np.ndarray:
    """At each point of the line: l - p . u and u, in laps, and how much they change until the next point. (points + 1, 6)"""
    line, length = shortest_line(track)
    ahead = np.roll(line, -1, 0) - line
    chords = np.hypot(*ahead.T)
    travelled = np.cumsum(chords) - chords
    along = np.roll(line, -1, 0) - np.roll(line, 1, 0)
    along /= np.hypot(*along.T)[:, None]
    values = np.column_stack([travelled - (line * along).sum(1), along]) / length
    values = np.append(values, values[:1] + [[1.0, 0.0, 0.0]], axis=0)  # the first point again, a lap further
    return np.column_stack([values, np.diff(values, axis=0, append=values[-1:])])
