"""How fast can a lap be? The shortest closed line on the road, and the time that no clean lap can beat.

    line, length = shortest_line(load_track("track-01"))      # (480, 2), 1026.6 units
    limit_seconds(load_track("track-01"))                     # 6.416 s, length / MAX_SPEED

A lap that never leaves the road is a closed line on the road, so it is no shorter than `length`, and no car is faster than
MAX_SPEED: that bounds every clean lap from a flying start. (Laps are counted in ticks, so one may be up to a tick below.) Good
laps on the game's tracks come within a tick of it, since there full throttle is right all the way. Where a turn needs braking
the bound cannot be reached; then it still bounds, but says less. A lap that cuts over the shoulder can be quicker.
"""

from __future__ import annotations

import functools

import numpy as np

from racer.game.rules import MAX_SPEED
from racer.game.track import Track

COUNTS = (60, 120, 240, 480)  # points of the line: a coarse one first, then ever finer ones that begin with it
STEPS = 150  # of each


@functools.lru_cache(maxsize=512)
def shortest_line(track: Track) -> tuple[np.ndarray, float]:
    """The shortest closed line that stays on the road: points in the order of driving (480, 2), and its length.

    Every point may move along the normal of the centreline, as far as the road reaches. Gradient steps shorten the line.
    """
    sideways, s_before = np.zeros(1), np.zeros(1)
    for count in COUNTS:
        s = np.arange(count) * track.length / count
        tangent, centre, half_width = track.tangent(s), track.position(s), track.half_width(s)
        normal = np.stack([-tangent[:, 1], tangent[:, 0]], axis=1)
        sideways = _shorten(np.interp(s, s_before, sideways, period=track.length), centre, normal, half_width)
        s_before = s
    line = centre + sideways[:, None] * normal
    return line, _length(line)


def limit_seconds(track: Track) -> float:
    return shortest_line(track)[1] / MAX_SPEED


def _shorten(sideways, centre, normal, half_width) -> np.ndarray:
    """Projected gradient descent on the length, with momentum, which starts again whenever the line became longer."""
    before, ahead, age, shortest = sideways, sideways, 1.0, np.inf
    for _ in range(STEPS):
        line = centre + ahead[:, None] * normal
        chord = np.roll(line, -1, 0) - line
        lengths = np.sqrt((chord * chord).sum(1)) + 1e-12
        along = chord / lengths[:, None]
        slope = ((np.roll(along, 1, 0) - along) * normal).sum(1)
        # The length's second derivative at a point is at most 4 / (the shorter of its two chords).
        step = np.minimum(lengths, np.roll(lengths, 1)) / 4
        sideways = np.clip(ahead - step * slope, -half_width, half_width)
        age = 1.0 if lengths.sum() > shortest else (1 + np.sqrt(1 + 4 * age * age)) / 2
        shortest = lengths.sum()
        ahead = sideways + (age - 1) / (age + 2) * (sideways - before) if age > 1 else sideways
        before = sideways
    return sideways


def _length(line) -> float:
    return float(np.hypot(*(np.roll(line, -1, 0) - line).T).sum())
