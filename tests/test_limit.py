"""How fast can a lap be? The shortest line against closed forms, and against everything that has been driven."""

from __future__ import annotations

import math

import numpy as np
import pytest

from racer.game import limit
from racer.game.limit import limit_seconds, shortest_line
from racer.game.rules import DT_S
from racer.game.track import Track
from racer.game.tracks import TRACKS, load_track
from racer.training.references import BEST_LAP_TICKS, best_known_lap, full_throttle, hand_written_settings, limit_lap

KNOWN = {"track-01": 1026.62, "track-02": 2524.10, "track-03": 2697.85}  # units


def circle(radius: float, half_width: float) -> Track:
    angle = np.linspace(0, 2 * math.pi, 36, endpoint=False)
    return Track("circle", np.column_stack([radius * np.cos(angle), radius * np.sin(angle), np.full(36, half_width)]))


@pytest.mark.parametrize(("radius", "half_width"), [(200.0, 20.0), (400.0, 60.0)])
def test_around_a_circle_the_inner_edge_is_the_shortest(radius, half_width):
    line, length = shortest_line(circle(radius, half_width))
    assert length == pytest.approx(2 * math.pi * (radius - half_width), rel=1e-3)
    np.testing.assert_allclose(np.hypot(*line.T), radius - half_width, atol=0.1)


@pytest.mark.parametrize("track", TRACKS)
def test_the_game_s_tracks_and_finer_lines(track, monkeypatch):
    length = shortest_line(load_track(track))[1]
    assert length == pytest.approx(KNOWN[track], rel=2e-4)
    monkeypatch.setattr(limit, "COUNTS", (60, 120, 240, 480, 960, 1600))
    assert shortest_line.__wrapped__(load_track(track))[1] == pytest.approx(length, rel=2e-4)
    narrow = Track("narrow", np.array(TRACKS[track]) * [1, 1, 0.5])
    assert shortest_line(narrow)[1] > 1.005 * length, "half the width is a wrong line"


OTHER_SCALES = [pytest.param(track, marks=pytest.mark.slow) for track in ("any-3", "random-8-long-wide")]


@pytest.mark.parametrize("track", ["track-01", "track-02", "track-03", "random-1", "random-8", *OTHER_SCALES])
def test_the_line_stays_on_the_road_and_no_clean_lap_is_faster_than_it_by_more_than_a_tick(track):
    shape = load_track(track)
    line, length = shortest_line(shape)
    arc, distance = shape.project(line)
    assert (distance <= shape.half_width(arc) + 0.3).all() and length < shape.length
    lap = limit_lap(track)
    assert lap.complete and lap.off_road_share == 0 and abs(lap.seconds - limit_seconds(shape)) < DT_S
    if track in TRACKS:
        assert BEST_LAP_TICKS["clean"][track] * DT_S > limit_seconds(shape) - DT_S
        assert best_known_lap(track).path_length > length - 160 * DT_S


@pytest.mark.parametrize("number", [5, 8, 15])
def test_in_turns_tighter_than_the_road_is_wide_the_line_does_not_zigzag(number):
    line, _ = shortest_line(load_track(f"random-{number}"))
    heading = np.arctan2(*(np.roll(line, -1, 0) - line).T[::-1])
    turn = np.mod(np.roll(heading, -1) - heading + math.pi, 2 * math.pi) - math.pi
    assert np.abs(turn).max() < math.radians(20)


@pytest.mark.slow
def test_a_driver_that_stays_on_the_road_is_slower_than_the_limit():
    from racer.training.evaluation import evaluate
    from racer_env import RacerVectorEnv

    tracks = [f"random-{n}" for n in range(1, 9)]
    settings = hand_written_settings(tracks)
    gain, offset = np.array([settings[track][1:] for track in tracks]).T
    clean = 0
    for episode in evaluate(lambda obs: full_throttle(obs, gain, offset), RacerVectorEnv(8, tracks), tracks):
        for lap in (lap for lap in episode.laps if lap.flying and not lap.off_road):
            clean += 1
            assert lap.ticks * DT_S > limit_seconds(load_track(episode.track)) - DT_S
    assert clean >= 5
