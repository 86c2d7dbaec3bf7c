"""From control points to centreline, walls and gates, and what a bad track gets."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from slow_engine import SlowTrack, between_the_walls

from ppo_racer import Args
from racer.game.sim import RacerSim
from racer.game.track import Track
from racer.game.tracks import RANDOM_HALF_WIDTH, TRACKS, load_track
from racer.game.world import World, tables_of
from racer.training.run import Run

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


def projected(track, points, by_search: bool = False):
    """Arc length, distance, half-width (N,) of the places (N, 2)."""
    world, number = World([track]), np.zeros(len(points), np.intp)
    if by_search:
        world.guess_u[:] = np.nan  # the tables know nothing
    with np.errstate(all="ignore"):
        return world.project(number, *points.T, world.locate(number, *points.T))


def test_search_agrees_with_the_tables_and_copes_with_ties(pair):
    track, slow = pair
    points = np.array([track.position(s) + [3.0, -2.0] for s in np.linspace(0, track.length, 40)])
    s, distance, _ = projected(track, points, by_search=True)
    theirs, their_distance = np.array([slow.project(*p) for p in points]).T
    gap = np.abs(s - theirs) / track.length
    assert np.minimum(gap, 1 - gap).max() < 1e-5
    np.testing.assert_allclose(distance, their_distance, atol=2e-3)


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


PLACES = 10_000  # on each of 23 tracks; with 44,000 it is a million, and half a minute


def assert_projection_is_right(track: Track, count: int) -> None:
    points = between_the_walls(track, count, seed=7)
    s, distance, half_width = projected(track, points)
    true_s, true_distance, gap = nearest_by_force(track, points)
    # Of two branches as near as each other, either will do; and where a turn's centre is, the search may find the better one.
    clear = (gap > 1e-3) & (distance > true_distance - 1e-6)
    error = np.abs(np.mod(s - true_s + track.length / 2, track.length) - track.length / 2)
    assert error[clear].max() < 1e-3 and np.abs(distance - true_distance).max() < 1e-3, points[(error * clear).argmax()]
    np.testing.assert_allclose(half_width[clear], track.half_width(true_s[clear]), atol=1e-3)


@pytest.mark.parametrize("name", ["track-01", "track-02", pytest.param("track-03", marks=pytest.mark.slow)])
def test_the_projection_is_right_between_the_walls(name):
    """Where the road turns around a car, or two parts of it are about as near, too."""
    assert_projection_is_right(load_track(name), 6_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TRACKS, *(f"random-{n}" for n in range(1, 21)), *(f"any-{n}" for n in range(1, 6))])
def test_the_projection_is_right_everywhere_on_many_tracks(name):
    assert_projection_is_right(load_track(name), PLACES)


def test_a_json_track_drives_like_a_built_in_one(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "copy", "control_points": TRACKS["track-01"]}))
    mine, built_in = RacerSim(3, [str(path)]), RacerSim(3, ["track-01"])
    for _ in range(50):
        a, b = (sim.step(np.tile([0.1, 1.0, 0.0], (3, 1)))[0] for sim in (mine, built_in))
        np.testing.assert_array_equal(a, b)


def test_tables_stay_small():
    for name in TRACKS:
        values = [value for tables in tables_of(load_track(name)) for value in vars(tables).values()]
        assert sum(value.nbytes for value in values if isinstance(value, np.ndarray)) < 50e6


def test_random_tracks_are_the_same_for_everybody():
    """The numbers of another machine and another day. If this fails, drivers and results of others are of other tracks."""
    golden = {
        1: [[136.9, -180.0, 23.2], [192.7, -150.2, 22.4]],
        24: [[-432.1, 53.9, 20.6], [-475.0, 150.9, 20.6]],
        10_001: [[248.9, 136.6, 12.7], [327.0, 95.3, 13.9]],
    }
    for number, points in golden.items():
        np.testing.assert_array_equal(load_track(f"random-{number}").control_points[:2], points)
    assert load_track("random-7") is load_track("random-7")


def test_random_tracks_are_like_the_game_s_and_of_all_kinds():
    tracks, tight, ways, both = [load_track(f"random-{number}") for number in range(1, 41)], [], [], 0
    for track in tracks:
        assert 950 < track.length < 3_150
        widths = track.control_points[:, 2]
        assert RANDOM_HALF_WIDTH[0] <= widths.min() and widths.max() <= RANDOM_HALF_WIDTH[1]
        tangent = track.tangent(np.arange(0, track.length, 2.0)) @ [1, 1j]
        turn = np.angle(np.roll(tangent, -1) / tangent) / 2.0
        both += turn.min() < -1 / 150 and turn.max() > 1 / 150
        tight.append(1 / np.abs(turn).max())
        ways.append(np.sign(turn.sum()))
    assert sum(radius < 25 for radius in tight) >= 5 and sum(radius > 40 for radius in tight) >= 5
    assert both > 30, "nearly all turn both ways"
    assert 10 <= sum(way > 0 for way in ways) <= 30, "some go around to the left, some to the right"
    assert min(track.length for track in tracks) < 1_300 and max(track.length for track in tracks) > 2_700


def test_tracks_of_any_scale_are_all_that_a_person_may_draw():
    tracks = [load_track(f"any-{number}") for number in range(1, 41)]
    lengths, widths = np.array([(track.length, track.control_points[:, 2].mean()) for track in tracks]).T
    assert 800 < lengths.min() < 1_400 and 5_000 < lengths.max() < 8_500
    assert 8 < widths.min() < 13 and 45 < widths.max() <= 60
    assert abs(np.corrcoef(lengths, widths)[0, 1]) < 0.4, "long ones may be narrow, short ones wide"
    np.testing.assert_array_equal(load_track("any-1").control_points[:2], [[234.4, -308.2, 25.2], [330.0, -257.2, 24.3]])


@pytest.mark.parametrize("number", [1, 5, 10_001])
def test_a_random_track_can_be_had_twice_as_long_or_as_wide(number):
    plain, long, wide, both = (load_track(f"random-{number}{kind}") for kind in ("", "-long", "-wide", "-long-wide"))
    assert long.length > 1.8 * plain.length and both.length > 1.8 * wide.length
    half_widths = [track.control_points[:, 2].mean() for track in (plain, long, wide, both)]
    np.testing.assert_allclose(np.array(half_widths) / half_widths[0], [1, 1, 2, 2], rtol=0.3)


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
    with pytest.raises(ValueError, match=r"unknown track 'nope'. Available: track-01, track-02, track-03, random-1"):
        load_track("nope")
    with pytest.raises(ValueError, match=r"unknown track 'random-x'"):
        load_track("random-x")
    with pytest.raises(ValueError, match="cannot be read"):
        load_track(str(tmp_path / "missing.json"))
    for text, message in (
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must be an object"),
        ('{"name": 3, "control_points": []}', "name is 3"),
    ):
        path = tmp_path / "file.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_track(str(path))


def test_walls_that_cross_are_refused_with_the_place():
    hairpin = [(0, 0, 18), (220, 0, 18), (260, 40, 12), (220, 80, 18), (60, 80, 14), (30, 110, 9), (60, 140, 14),
               (220, 150, 20), (260, 230, 22), (100, 300, 24), (-120, 220, 24), (-140, 60, 22)]  # fmt: skip
    with pytest.raises(ValueError, match=r"'mine': the walls cross near control point 3 \(220, 80, 18\)"):
        Track("mine", hairpin)


def test_a_track_file_s_name_is_fit_for_files_and_tags(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "my/track", "control_points": OVAL}))
    with pytest.raises(ValueError, match="my/track"):
        load_track(str(path))
    path.write_text(json.dumps({"name": "track-01", "control_points": OVAL}))
    with pytest.raises(ValueError, match="different names"):
        Run("ppo", Args(track_id=("track-01", str(path)))).__enter__()
