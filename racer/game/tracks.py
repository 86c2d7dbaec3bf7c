"""Which tracks there are: the game's three, random ones by number, and JSON files. `load_track` finds each by its name."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from pathlib import Path

import numpy as np

from racer.game.checks import UserError, read_json
from racer.game.random_numbers import STEP, scramble
from racer.game.rules import RUNOFF_WIDTH
from racer.game.track import Track, check_control_points, squared_distances

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
RANDOM = re.compile(r"(random|any)-(0|[1-9]\d{0,14})(-long)?(-wide)?")  # "-long": twice as long; "-wide": twice as wide
CACHED_TRACKS = 512  # of a process; a Track is small, and its tables (world.py) are cached in smaller numbers
RANDOM_LENGTH, RANDOM_HALF_WIDTH = (1_100.0, 3_000.0), (11.0, 30.0)  # of random tracks: about those of the game
ANY_LENGTH, ANY_WIDTH = (0.8, 2.6), (0.75, 2.4)  # of "any" tracks: times these, and no wider than MOST_HALF_WIDTH
MOST_HALF_WIDTH = 60.0


def load_track(track_id: str) -> Track:
    """A built-in or random track by name, or a track from a JSON file by path. The same contents give the same object."""
    if track_id in _pinned:
        return _pinned[track_id]
    if track_id in TRACKS:
        return _cached_track(track_id, tuple(TRACKS[track_id]))
    if found := RANDOM.fullmatch(str(track_id)):
        return random_track(*found.groups())
    path, form = Path(track_id), '{"name": ..., "control_points": [[x, y, half_width], ...]}'
    if path.suffix.lower() != ".json":
        names = f"{', '.join(TRACKS)}, random-1, random-1-wide, any-1 and so on"
        raise UserError(f"unknown track {track_id!r}. Available: {names}, or the path of a .json file {form}")
    data = read_json(path, "track file")
    if not isinstance(data, dict) or "control_points" not in data:
        raise UserError(f"track file {path} must be an object {form}")
    name = data.get("name", path.stem)
    if not isinstance(name, str) or not re.fullmatch(r"[\w][\w .-]*", name):  # files and tags are named after it
        raise UserError(f"track file {path}: name is {name!r}; it must be a string of letters, digits, spaces and . _ -")
    points = check_control_points(name, data["control_points"])
    return _track_of_file(name, tuple(map(tuple, points.tolist())))


_pinned: dict[str, Track] = {}


@contextlib.contextmanager
def pinned_tracks(track_ids):
    """Inside, track files are as they were at its beginning: one that is edited or deleted changes nothing for a run."""
    files = {track: load_track(track) for track in track_ids if track.lower().endswith(".json")}
    _pinned.update(files)
    try:
        yield
    finally:
        for track in files:
            _pinned.pop(track, None)


def check_game_tracks(track_ids) -> None:
    """UserError for a track that the real game cannot have."""
    for track in track_ids:
        if track.lower().endswith(".json") or RANDOM.fullmatch(track):
            raise UserError(f"track {track!r} exists only here; in the real game --track-id is one of {', '.join(TRACKS)}")


def has_shape(track_id: str) -> bool:
    """Whether the track is known here. (A bridge may have others.)"""
    return track_id in TRACKS or track_id.lower().endswith(".json") or RANDOM.fullmatch(track_id) is not None


def track_name(track_id: str) -> str:
    """What texts, tags and files call a track: the name in its JSON file, or the id itself."""
    return load_track(track_id).name if track_id.lower().endswith(".json") else track_id


@functools.lru_cache(maxsize=CACHED_TRACKS)
def _cached_track(name: str, control_points: tuple) -> Track:
    return Track(name, control_points)


@functools.lru_cache(maxsize=CACHED_TRACKS)
def _track_of_file(name: str, control_points: tuple) -> Track:
    track = Track(name, control_points)
    track.check_width()
    return track


@functools.lru_cache(maxsize=CACHED_TRACKS)
def random_track(kind: str, number: str, long: str | None, wide: str | None) -> Track:
    """A track by the parts of its name, the same on every machine: the first of ever gentler loops that a car can drive."""
    n = int(number)
    # Fractional parts of multiples of a square root: lengths, widths and wildness are spread evenly over any range of numbers.
    size, width, wild, *scales = (n * math.sqrt(prime) % 1 for prime in (2, 3, 5, 7, 11))
    longer, wider = 2.0 if long else 1.0, 2.0 if wide else 1.0
    if kind == "any":
        by = [low * (high / low) ** at for at, (low, high) in zip(scales, (ANY_LENGTH, ANY_WIDTH), strict=True)]
        longer, wider = longer * by[0], wider * by[1]
    for attempt in itertools.count():
        points = _random_loop(n << 16 | attempt, size, width, (0.3 + 0.7 * wild) * 0.97**attempt, longer, wider)
        if points is not None:
            with contextlib.suppress(UserError):
                return Track(f"{kind}-{number}{long or ''}{wide or ''}", points)


def _random_loop(state: int, size: float, wide: float, wild: float, longer=1.0, wider=1.0) -> np.ndarray | None:
    """A closed loop with dents (hairpins) and kinks (chicanes), bent twice, and then scaled. None if parts of it are too close to
    each other."""

    def pick(low: float, high: float) -> float:
        nonlocal state
        state = (state + STEP) % 2**64
        return low + (high - low) * (int(scramble(np.array([state], np.uint64))[0]) >> 11) / 2**53

    length = RANDOM_LENGTH[0] + size * (RANDOM_LENGTH[1] - RANDOM_LENGTH[0])
    # 1. a loop around a centre: waves, then dents
    angle = np.linspace(0, 2 * math.pi, 400, endpoint=False)
    waves = (pick(0, 0.35) / math.sqrt(k) * np.cos(k * angle + pick(0, 2 * math.pi)) for k in (2, 3, 4, 5))
    radius = 1 + wild * sum(waves)
    for _ in range(int(pick(0, 1.5 + 2.5 * size))):  # a longer track has room for more
        away = np.mod(angle - pick(0, 2 * math.pi), 2 * math.pi) - math.pi
        radius *= 1 - pick(0.2, 0.75) * wild * np.exp(-((away / pick(0.2, 0.45)) ** 2))
    x, y = radius * np.cos(angle), radius * np.sin(angle) * pick(0.6, 1)
    # 2. bent twice, so that it no longer has to circle its centre
    for _ in range(2):
        x, y = y, x + pick(0, 0.45) * wild * np.sin(2 * math.pi * y / pick(1.2, 2.5) + pick(0, 2 * math.pi))
    # 3. control points along it, not quite evenly spaced
    arc = np.append(0, np.cumsum(np.hypot(np.diff(x, append=x[0]), np.diff(y, append=y[0]))))
    count = min(max(round(length / pick(55, 110)), 12), 40)
    uneven = pick(0, 0.2)
    s = (np.arange(count) + [pick(-uneven, uneven) for _ in range(count)]) * (arc[-1] / count)
    points = np.stack([np.interp(s, arc[:-1], v, period=arc[-1]) for v in (x, y)], axis=1) * (length / arc[-1])
    width = RANDOM_HALF_WIDTH[0] + wide * (RANDOM_HALF_WIDTH[1] - RANDOM_HALF_WIDTH[0])
    width *= 1 + pick(0, 0.35) * np.cos(2 * math.pi * int(pick(1, 4)) * s / arc[-1] + pick(0, 2 * math.pi))
    # 4. chicanes
    for _ in range(int(pick(0, 3.5 * wild))):
        _add_chicane(points, int(pick(0, count)), pick(8, 22), int(pick(2, 5)))
    # 5. it begins where it is straightest, in either direction
    edge = np.diff(points, axis=0, append=points[:1])
    turn = np.abs(np.angle((edge @ [1, 1j]) / np.roll(edge @ [1, 1j], 1)))
    straightest = int((turn + np.roll(turn, 1) + np.roll(turn, -1)).argmin())
    points = np.roll(np.column_stack([points, np.clip(width, *RANDOM_HALF_WIDTH)]), -straightest, axis=0)
    points = points[:: 1 if pick(0, 1) < 0.5 else -1] * [longer, longer, wider]
    points[:, 2] = np.minimum(points[:, 2], MOST_HALF_WIDTH)
    points, length = points.round(1), length * longer  # rounded, since machines differ in the last bit of a cosine
    # A quick test for crossing walls: two places that are close, but far apart along the road.
    walls = points[:, None, 2] + points[:, 2] + 2 * RUNOFF_WIDTH
    close = squared_distances(points, points) < walls**2
    apart = np.abs(np.arange(count)[:, None] - np.arange(count)) * (length / count)
    return None if (close & (np.minimum(apart, length - apart) > 1.6 * walls)).any() else points


def _add_chicane(points: np.ndarray, first: int, aside: float, length: int) -> None:
    """Move some neighbouring points to the left and to the right in turn."""
    count = len(points)
    for i in range(first, first + length):
        along = points[(i + 1) % count] - points[(i - 1) % count]
        points[i % count] += aside * (-1) ** i * np.array([-along[1], along[0]]) / np.hypot(*along)
