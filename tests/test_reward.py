"""The six reward parts and the two ways an episode ends."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import drive, make_config
from slow_engine import SlowTrack

from racer.game.sim import RacerSim
from racer.game.tracks import TRACKS, load_track

STILL = np.zeros((1, 3))


def put(sim: RacerSim, s: float, lateral: float = 0.0, turn: float = 0.0, speed: float = 0.0) -> None:
    track = sim.world.tracks[0]
    (x, y), (tx, ty) = track.position(np.array(s)), track.tangent(np.array(s))
    heading = math.atan2(ty, tx) + turn
    sim.place(*(np.array([value]) for value in (0, x - ty * lateral, y + tx * lateral, heading, speed)))


def test_reward_is_the_sum_of_its_parts():
    sim = RacerSim(8, start="anywhere", config=make_config(speedBonus=0.01, backwardPenalty=-0.5))
    for _ in range(50):
        _, rewards, *_ = sim.step(np.random.default_rng(0).uniform([-1, 0, 0], 1, (8, 3)))
        np.testing.assert_allclose(rewards, sum(sim.parts.values()), atol=1e-15)


def test_progress_over_a_clean_lap_is_one():
    sim = RacerSim(1)
    observations, progress = sim.observe(), 0.0
    while sim.lap[0] == 1:
        observations, *_ = sim.step(drive(observations))
        progress += sim.parts["progress"][0]
    assert progress == pytest.approx(1.0, abs=0.01)
    laps = progress - sim.s[0] / load_track("track-01").length  # telescopes: whole laps exactly
    assert laps == pytest.approx(round(laps), abs=1e-9)


def test_progress_wraps_at_the_line_both_ways():
    length = load_track("track-01").length
    sim = RacerSim(1)
    put(sim, length - 0.5, speed=120)
    sim.step(STILL)
    assert sim.parts["progress"][0] == pytest.approx(2 / length, rel=0.05)
    put(sim, 0.5, turn=math.pi, speed=120)
    sim.step(STILL)
    assert sim.parts["progress"][0] == pytest.approx(-2 / length, rel=0.05)


def test_backward_penalty_only_when_arc_length_falls():
    sim = RacerSim(1, config=make_config(backwardPenalty=-0.25))
    put(sim, 300.0, turn=math.pi, speed=50)
    sim.step(STILL)
    assert sim.parts["backward"][0] == -0.25
    put(sim, 300.0, speed=50)
    sim.step(STILL)
    assert sim.parts["backward"][0] == 0.0
    still = RacerSim(1, config=make_config(backwardPenalty=-0.25))
    for _ in range(5):
        still.step(STILL)
        assert still.parts["backward"][0] == 0.0 and still.s[0] == 0.0


def test_off_track_begins_exactly_at_the_edge_of_the_road():
    sim = RacerSim(1)  # track-01: half-width 25
    for lateral, penalty in ((24.9, 0.0), (-24.9, 0.0), (25.1, -0.001), (-25.1, -0.001), (48.9, -0.001)):
        put(sim, 40.0, lateral)
        sim.step(STILL)
        assert sim.parts["offTrack"][0] == penalty, lateral
    for lateral, surface in ((10, 0), (30, 1), (48.9, 1), (49.2, 2)):
        put(sim, 40.0, lateral)
        assert sim.surface()[0] == surface


def test_wall_penalty_within_two_units_of_a_wall():
    sim = RacerSim(1)
    track = SlowTrack(TRACKS["track-01"])
    (x, y), (tx, ty) = track.position(40.0), track.tangent(40.0)
    lateral = next(d for d in np.arange(45, 60, 0.01) if track.nearest_wall(x - ty * d, y + tx * d)[0] < 2.0)
    for d, penalty in ((lateral - 0.05, 0.0), (lateral + 0.05, -0.002)):
        put(sim, 40.0, d)
        sim.step(STILL)
        assert sim.parts["wall"][0] == penalty
        assert sim.wall_contact[0] == (penalty != 0)


def test_stillness_counts_in_a_row_and_terminates():
    sim = RacerSim(1, config=make_config(stillnessTimeoutTicks=10))
    for _ in range(9):
        _, _, terminated, _ = sim.step(STILL)
        assert not terminated[0] and sim.parts["stillness"][0] == -0.001
    assert sim.stillness[0] == 9
    put(sim, 100.0, speed=30)  # moving once starts the count again
    sim.step(STILL)
    assert sim.stillness[0] == 0 and sim.parts["stillness"][0] == 0.0
    put(sim, 100.0, speed=0)
    ends = [bool(sim.step(STILL)[2][0]) for _ in range(10)]
    assert ends == [False] * 9 + [True]


def test_truncation_at_max_steps():
    sim = RacerSim(1, config=make_config(maxSteps=7))
    ends = [tuple(bool(e[0]) for e in sim.step(STILL)[2:]) for _ in range(7)]
    assert ends == [(False, False)] * 6 + [(False, True)]
