"""Rays and wall distances: the tables must never change an answer. Compared with testing every wall."""

from __future__ import annotations

import math

import numpy as np
import pytest
from slow_engine import SlowTrack, between_the_walls

from racer.game.rules import RAY_ANGLES, RAY_RANGE, WALL_TOUCH
from racer.game.sim import RacerSim
from racer.game.track import Track
from racer.game.tracks import TRACKS, load_track
from racer.game.world import World, tables_of

HAIRPINS = [(1.7 * x, 1.7 * y, width) for x, y, width in (
    (0, 0, 18), (220, 0, 18), (260, 40, 12), (220, 80, 18), (60, 80, 14), (30, 110, 9), (60, 140, 14), (220, 150, 20),
    (260, 230, 22), (100, 300, 24), (-120, 220, 24), (-140, 60, 22),
)]  # fmt: skip


def all_walls(track: Track):
    start = np.concatenate([track.outer, track.inner])
    return start, np.concatenate([np.roll(track.outer, -1, 0), np.roll(track.inner, -1, 0)]) - start


def brute_force_rays(track: Track, points, angles) -> np.ndarray:
    start, edge = all_walls(track)
    result = np.empty(len(points))
    for i in range(0, len(points), 500):
        p, dx, dy = points[i : i + 500], np.cos(angles[i : i + 500])[:, None], np.sin(angles[i : i + 500])[:, None]
        wx, wy = start[:, 0] - p[:, :1], start[:, 1] - p[:, 1:]
        with np.errstate(all="ignore"):
            det = dx * edge[:, 1] - dy * edge[:, 0]
            t, u = (wx * edge[:, 1] - wy * edge[:, 0]) / det, (wx * dy - wy * dx) / det
        result[i : i + 500] = np.where((t >= 0) & (u >= 0) & (u <= 1), t, RAY_RANGE).min(1)
    return np.minimum(result, RAY_RANGE)


def cast(track: Track, points, heading) -> np.ndarray:
    world, number = World([track]), np.zeros(len(points), np.intp)
    with np.errstate(all="ignore"):
        return world.cast_rays(world.locate(number, *points.T)[0], *points.T, heading)


TRACK_03 = pytest.param("track-03", marks=pytest.mark.slow)  # has more walls than the others


@pytest.mark.parametrize("make", ["track-01", "track-02", TRACK_03, "random-9", "random-24", "hairpins"])
def test_rays_are_those_of_testing_every_wall(make):
    track = Track(make, HAIRPINS) if make == "hairpins" else load_track(make)
    points = between_the_walls(track, 6000, seed=3)
    heading = np.random.default_rng(4).uniform(-15, 15, len(points))
    mine = cast(track, points, heading)
    for k, angle in enumerate(RAY_ANGLES):
        np.testing.assert_allclose(mine[k], brute_force_rays(track, points, heading + angle), atol=1e-9 * RAY_RANGE)


@pytest.mark.slow
def test_rays_along_the_axes_and_the_borders_of_bins():
    """Headings and places that fall exactly on the borders of the tables."""
    track = Track("track-01", TRACKS["track-01"])
    points = np.concatenate([tables_of(track)[0].centres + offset for offset in ((0, 0), (4, 4), (-4, 0), (2, -2))])
    inside = between_the_walls(track, 20_000, 1)
    nearest = np.array([np.hypot(*(inside - p).T).min() for p in points])
    points = points[nearest < 1.5]  # of these cells, those on the road side of the walls
    start, edge = all_walls(track)
    clear = np.array([_distance(p, start, edge).min() for p in points]) > 3
    points = points[clear]
    for heading in np.arange(8) * math.pi / 4:
        mine = cast(track, points, np.full(len(points), heading))
        for k, angle in enumerate(RAY_ANGLES):
            np.testing.assert_allclose(
                mine[k], brute_force_rays(track, points, np.full(len(points), heading + angle)), atol=1e-7
            )


def _distance(point, start, edge):
    share = np.clip(((point - start) * edge).sum(1) / (edge**2).sum(1), 0, 1)
    return np.hypot(*(start + share[:, None] * edge - point).T)


@pytest.mark.parametrize("make", ["track-01", "track-02", TRACK_03, "hairpins"])
def test_near_walls_are_found_and_the_clearance_is_a_lower_bound(make):
    track = Track(make, TRACKS.get(make, HAIRPINS))
    start, edge = all_walls(track)
    points = between_the_walls(track, 8000, seed=8)
    exact = np.array([_distance(p, start, edge).min() for p in points])
    world, number = World([track]), np.zeros(len(points), np.intp)
    subcell = world.locate(number, *points.T)[0]
    distance, wall_x, wall_y = world.nearest_wall(subcell, *points.T)
    near = exact < WALL_TOUCH
    assert near.sum() > 50
    np.testing.assert_allclose(distance[near], exact[near], atol=1e-12)
    np.testing.assert_allclose(np.hypot(wall_x - points[:, 0], wall_y - points[:, 1])[near], exact[near], atol=1e-12)
    assert (distance[~near] >= WALL_TOUCH).all()
    assert (world.clearance[subcell] <= exact + 1e-5).all()


def test_off_the_map_everything_still_has_an_answer():
    """A car cannot get there; if a user puts one there, rays and projection are exact all the same."""
    track = Track("track-02", TRACKS["track-02"])
    slow = SlowTrack(TRACKS["track-02"])
    # far inside the inner wall, and beyond every side of the map
    points = np.array([[-100.0, 0.0], [0.0, 100.0], [800.0, 0.0], [-900.0, 20.0], [0.0, 700.0], [10.0, -600.0]])
    heading = np.array([0.3, 2.0, 3.1, 0.3, -1.5, 1.6])
    mine = cast(track, points, heading)
    for k, angle in enumerate(RAY_ANGLES):
        np.testing.assert_allclose(mine[k], brute_force_rays(track, points, heading + angle), atol=1e-9)
    world, number = World([track]), np.zeros(len(points), np.intp)
    with np.errstate(all="ignore"):
        s, distance, _ = world.project(number, *points.T, world.locate(number, *points.T))
    for i in range(len(points)):
        assert (s[i], distance[i]) == pytest.approx(slow.project(*points[i]), abs=2e-2)


def test_yaw_rate_is_clamped_in_the_observation():
    sim = RacerSim(2)
    sim.yaw_rate = np.array([9.0, -9.0])
    assert sim.observe()[:, 10].tolist() == [1.0, -1.0]
