"""From control points to centreline, walls and gates, and what a bad track gets."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from slow_engine import SlowTrack

from racer_sim import GATES, TRACKS, RacerSim, Track, World, load_track

OVAL = [[0, 0, 20], [200, 0, 20], [300, 100, 15], [200, 200, 20], [0, 200, 20], [-100, 100, 20]]


@pytest.fixture(scope="module", params=[*TRACKS, "oval"])
def pair(request):
    points = TRACKS.get(request.param, OVAL)
    return Track(request.param, points), SlowTrack(points)


def test_centreline_and_half_width_are_the_game_s(pair):
    track, slow = pair
    assert track.length == pytest.approx(slow.length, abs=1e-9)
    for s in np.linspace(-50, track.length + 50, 97):
        np.testing.assert_allclose(track.position(s), slow.position(s), atol=1e-9)
        np.testing.assert_allclose(track.tangent(s), slow.tangent(s), atol=1e-9)
        assert float(track.half_width(s)) == pytest.approx(slow.half_width(s), abs=1e-9)


def test_walls_and_gates_are_the_game_s(pair):
    track, slow = pair
    for mine, other in ((track.outer, slow.outer), (track.inner, slow.inner)):
        same_way, reversed_ = np.abs(mine - other).max(), np.abs(mine - other[::-1]).max()
        assert min(same_way, reversed_) < 1e-9
    for k, (inner, outer, direction) in enumerate(slow.gates):
        np.testing.assert_allclose(track.gate_inner[k], inner, atol=1e-9)
        np.testing.assert_allclose(track.gate_outer[k], outer, atol=1e-9)
        np.testing.assert_allclose(track.gate_direction[k], direction, atol=1e-9)


def test_projection_follows_the_game_s_search(pair):
    track, slow = pair
    rng = np.random.default_rng(1)
    s = rng.uniform(0, track.length, 300)
    normal = track.tangent(s) @ np.array([[0.0, 1.0], [-1.0, 0.0]])
    points = track.position(s) + normal * rng.uniform(-1, 1, (300, 1)) * (track.half_width(s)[:, None] + 20)
    sim = RacerSim(1)
    sim.world = type(sim.world)([track])
    zeros = np.zeros(300, np.intp)
    with np.errstate(all="ignore"):
        mine, distance, half_width = sim.world.project(zeros, *points.T, sim.world.locate(zeros, *points.T))
    theirs, their_distance = np.array([slow.project(*p) for p in points]).T
    gap = np.abs(mine - theirs) / track.length
    assert np.minimum(gap, 1 - gap).max() < 2e-4
    assert np.abs(distance - their_distance).max() < 2e-5 * 80
    np.testing.assert_allclose(half_width, track.half_width(mine), atol=0.02)


def test_search_agrees_with_the_tables_and_copes_with_ties(pair):
    track, slow = pair
    points = np.array([track.position(s) + [3.0, -2.0] for s in np.linspace(0, track.length, 40)])
    s, distance = track.search(*points.T)
    theirs, their_distance = np.array([slow.project(*p) for p in points]).T
    gap = np.abs(s - theirs) / track.length
    assert np.minimum(gap, 1 - gap).max() < 1e-5
    np.testing.assert_allclose(distance, their_distance, atol=2e-3)


def some_track(number: int) -> Track:
    """A closed loop of random shape, with turns of all kinds."""
    rng = np.random.default_rng(number)
    while True:
        angle = 2 * np.pi * (np.arange(count := int(rng.integers(12, 25))) + rng.uniform(-0.3, 0.3, count)) / count
        waves = [rng.uniform(0, 0.35) / k * np.cos(k * angle + rng.uniform(0, 6.3)) for k in (2, 3, 4, 5)]
        loop = (1 + sum(waves)) * np.stack([np.cos(angle), rng.uniform(0.5, 1) * np.sin(angle)])
        loop *= rng.uniform(1100, 3000) / np.hypot(*np.diff(loop, append=loop[:, :1])).sum()
        width = rng.uniform(11, 32)
        try:
            return Track(f"some-{number}", [(x, y, width) for x, y in loop.T])
        except ValueError:  # its walls would leave no road
            continue


def places_between_the_walls(track: Track, count: int) -> np.ndarray:
    """(count, 2): a random one of the lines that begin at a place meets both walls an odd and an even number of times."""
    rng, found = np.random.default_rng(7), np.empty((0, 2))
    while len(found) < count:
        x, y = points = rng.uniform(track.outer.min(0), track.outer.max(0), (count, 2)).T
        inside = []
        for line in (track.outer, track.inner):
            crossed = np.zeros(count, bool)
            for (ax, ay), (bx, by) in zip(line, np.roll(line, -1, 0), strict=True):
                if ay != by:
                    crossed ^= ((ay <= y) != (by <= y)) & (ax + (y - ay) * (bx - ax) / (by - ay) > x)
            inside.append(crossed)
        found = np.concatenate([found, points.T[inside[0] & ~inside[1]]])
    return found[:count]


def nearest_by_force(track: Track, points: np.ndarray):
    """Every local minimum of samples a unit apart that could be the least, each narrowed down in thirds as the game does.

    -> s, distance, by how much the next one is farther, all (N,)
    """
    count = int(np.ceil(track.length))
    step, results = track.length / count, []
    samples = track.position(np.arange(count) * step)
    for some in np.array_split(points, len(points) // 400 + 1):
        near = np.hypot(some[:, None, 0] - samples[:, 0], some[:, None, 1] - samples[:, 1])
        least = (near <= np.roll(near, 1, 1)) & (near <= np.roll(near, -1, 1))
        point, sample = np.nonzero(least & (near <= near.min(1)[:, None] + 0.6))
        low, high = (sample - 1) * step, (sample + 1) * step
        for _ in range(40):
            a, b = low + (high - low) / 3, high - (high - low) / 3
            first = np.hypot(*(track.position(a) - some[point]).T) < np.hypot(*(track.position(b) - some[point]).T)
            low, high = np.where(first, low, a), np.where(first, b, high)
        distance = np.hypot(*(track.position((low + high) / 2) - some[point]).T)
        order = np.lexsort((distance, point))
        point, s, distance = point[order], (low + high)[order] / 2, distance[order]
        best = np.flatnonzero(np.diff(point, prepend=-1))
        others = np.setdiff1d(np.arange(len(point)), best)
        others = others[np.abs(s[others] - s[best][point[others]]) > 0.5]
        gap = np.full(len(some), np.inf)
        np.minimum.at(gap, point[others], distance[others] - distance[best][point[others]])
        results.append((np.mod(s[best], track.length), distance[best], gap))
    return tuple(np.concatenate(parts) for parts in zip(*results, strict=True))


PLACES = 20_000  # on each of 23 tracks; with 44,000 it is a million, and some 80 s


def assert_projection_is_right(track: Track, count: int) -> None:
    points, world = places_between_the_walls(track, count), World([track])
    number = np.zeros(count, np.intp)
    with np.errstate(all="ignore"):
        s, distance, half_width = world.project(number, *points.T, world.locate(number, *points.T))
    true_s, true_distance, gap = nearest_by_force(track, points)
    clear = gap > 1e-3  # of two branches as near as each other, either will do
    error = np.abs(np.mod(s - true_s + track.length / 2, track.length) - track.length / 2)
    assert error[clear].max() < 1e-3 and np.abs(distance - true_distance).max() < 1e-3, points[error.argmax()]
    np.testing.assert_allclose(half_width[clear], track.half_width(true_s[clear]), atol=1e-3)


@pytest.mark.parametrize("name", TRACKS)
def test_the_projection_is_right_between_the_walls(name):
    """Where the road turns around a car, or two parts of it are about as near, too."""
    assert_projection_is_right(load_track(name), 12_000)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(23))
def test_the_projection_is_right_everywhere_on_many_tracks(number):
    tracks = [*map(load_track, TRACKS), *([some_track(number)] if number >= 3 else [])]
    assert_projection_is_right(tracks[min(number, 3)], PLACES)


def test_a_track_is_built_once_per_process():
    assert load_track("track-01") is load_track("track-01")
    assert RacerSim(1).world.tracks[0] is load_track("track-01")


def test_a_json_track_drives_like_a_built_in_one(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "copy", "control_points": TRACKS["track-01"]}))
    mine, built_in = RacerSim(3, [str(path)]), RacerSim(3, ["track-01"])
    for _ in range(50):
        a, b = (sim.step(np.tile([0.1, 1.0, 0.0], (3, 1)))[0] for sim in (mine, built_in))
        np.testing.assert_array_equal(a, b)


def test_tables_stay_small():
    for name in TRACKS:
        tables = vars(load_track(name).tables).values()
        assert sum(value.nbytes for value in tables if isinstance(value, np.ndarray)) < 50e6


def test_gates_are_evenly_spaced_and_cross_the_road():
    track = load_track("track-02")
    assert len(track.gate_inner) == GATES
    s, _ = track.search(*((track.gate_inner + track.gate_outer) / 2).T)
    expected = np.arange(GATES) * track.length / GATES
    gap = np.abs(s - expected)
    assert np.minimum(gap, track.length - gap).max() < track.length / GATES / 2


def replaced(index, value):
    points = [list(p) for p in OVAL]
    points[index] = value
    return points


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (OVAL[:3], "3 control points; a closed track needs at least 4"),
        (replaced(2, [300, 100]), "control point 2 is [300, 100]; each point is [x, y, half_width]"),
        (replaced(2, "corner"), "control point 2 is 'corner'"),
        (replaced(1, [200, math.nan, 20]), "control point 1 [200, nan, 20] has a value that is not a finite number"),
        (replaced(1, [200, "0", 20]), "control point 1"),
        (replaced(4, [0, 200, 0]), "control point 4 (0, 200, 0) has half-width 0; it must be greater than 0"),
        (replaced(4, [0, 200, -3]), "half-width -3"),
        (replaced(3, [300, 100, 9]), "control point 2 (300, 100, 15) is at the same place as point 3"),
        (replaced(5, [0, 0, 20]), "control point 5 (0, 0, 20) is at the same place as point 0"),
        (replaced(0, [1e7, 0, 20]), "control point 0"),
        (
            [[0, 0, 20], [300, 0, 20], [5, 6, 20], [300, 12, 20], [0, 12, 20]],
            "the walls leave no road near control point",
        ),
        ({"x": 1}, "control_points must be a list"),
        (replaced(0, [10**400, 0, 20]), "is not a finite number"),
        (OVAL * 2, "the control points run around 2 times"),
        ([[i, i % 7, 9] for i in range(501)], "501 control points; the engine takes 500 at most"),
    ],
)
def test_a_bad_track_is_refused_with_the_point_and_the_reason(tmp_path, points, message):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"name": "bad", "control_points": points}))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_track(str(path))
    assert "'bad'" in str(error.value)


def test_an_unreadable_track_file_says_why(tmp_path):
    with pytest.raises(ValueError, match=r"unknown track 'nope'. Available: track-01, track-02, track-03"):
        load_track("nope")
    with pytest.raises(ValueError, match="cannot be read"):
        load_track(str(tmp_path / "missing.json"))
    for text, message in (
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must be an object"),
        ('{"name": 3, "control_points": []}', "name must be a text"),
    ):
        path = tmp_path / "file.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_track(str(path))
