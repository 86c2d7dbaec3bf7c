"""Cars in a batch, their states, starts and laps. (What a tick does is held against the recorded game: test_parity.py.)"""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import hold_random_inputs

from racer.game.rules import GATES
from racer.game.sim import RacerSim
from racer.game.tracks import TRACKS, load_track

FULL_THROTTLE = np.array([[0.0, 1.0, 0.0]])


def test_a_car_does_the_same_alone_and_in_a_batch():
    batch = RacerSim(33, ["track-01", "track-02", "track-03"], start="anywhere", seed=9)
    alone = RacerSim(1, ["track-02"], start="anywhere", seed=9 + 7)
    rng = np.random.default_rng(0)
    a, b = batch.observe()[7:8], alone.observe()
    for _ in range(300):
        np.testing.assert_array_equal(a, b)
        actions = rng.uniform([-1, 0, 0], [1, 1, 0.3], (33, 3))
        a, b = batch.step(actions)[0][7:8], alone.step(actions[7:8])[0]


@pytest.mark.parametrize("start", ["grid", "anywhere"])
def test_state_out_and_in_continues_bit_for_bit(start):
    tracks = ["track-01", "track-03"]
    rng = np.random.default_rng(2)
    plan = np.stack([hold_random_inputs(rng, 200) for _ in range(12)], axis=1)
    straight = RacerSim(12, tracks, start=start, seed=4)
    for tick in range(100):
        straight.step(plan[tick])
    saved = straight.get_state()
    assert all(type(v) is np.ndarray and v.dtype.kind in "fiub" for v in saved.values())
    put_back = RacerSim(12, tracks, start=start, seed=77)
    put_back.set_state(saved)
    for tick in range(100, 200):
        if tick == 150:  # random numbers are part of the state
            np.testing.assert_array_equal(straight.reset([1, 5]), put_back.reset([1, 5]))
        for x, y in zip(straight.step(plan[tick]), put_back.step(plan[tick]), strict=True):
            np.testing.assert_array_equal(x, y)
    for name in RacerSim.STATE:
        np.testing.assert_array_equal(getattr(straight, name), getattr(put_back, name))


def test_a_foreign_state_is_refused():
    sim = RacerSim(2)
    state = sim.get_state()
    with pytest.raises(ValueError, match="same number of cars"):
        RacerSim(3).set_state(state)
    with pytest.raises(ValueError, match="other tracks"):
        RacerSim(2, ["track-02"]).set_state(state)
    del state["heading"]
    with pytest.raises(ValueError, match="heading"):
        sim.set_state(state)


def test_what_a_step_returned_is_never_written_again():
    sim = RacerSim(4)
    observations, rewards, terminated, truncated = sim.step(np.tile(FULL_THROTTLE, (4, 1)))
    kept = [observations, rewards, terminated, truncated, sim.x, sim.lap, sim.step_count, *sim.parts.values()]
    copies = [array.copy() for array in kept]
    for _ in range(20):
        sim.step(np.tile(FULL_THROTTLE, (4, 1)))
    sim.reset([0])
    for array, copy in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(array, copy)


# -- starts and laps ---------------------------------------------------------------------------------------------------


def test_anywhere_starts_are_seeded_varied_and_on_the_road():
    for name in TRACKS:
        sim, again = (RacerSim(500, [name], start="anywhere", seed=6) for _ in range(2))
        np.testing.assert_array_equal(sim.x, again.x)
        assert (sim.centre_distance <= sim.half_width).all()
        observations, *_ = sim.step(np.zeros((500, 3)))
        assert not sim.wall_contact.any()
        assert observations[:, 12].min() < 0.05 and observations[:, 12].max() > 0.95
        assert sim.speed.min() < 10 and sim.speed.max() > 70
        assert sim.centre_distance.max() > 8
        first = sim.x.copy()
        sim.reset()
        assert not np.array_equal(first, sim.x), "the next start is another one"


def test_a_car_s_starts_do_not_depend_on_its_neighbours():
    many, one = RacerSim(10, start="anywhere", seed=20), RacerSim(1, start="anywhere", seed=23)
    for _ in range(3):
        assert many.x[3] == one.x[0] and many.speed[3] == one.speed[0]
        many.reset([3])
        one.reset()


@pytest.mark.parametrize("name", TRACKS)
def test_only_a_whole_lap_counts_from_any_start(name):
    """Carried along the centreline at 2 units a tick, past the line twice: the first crossing ends no lap, the second does."""
    track = load_track(name)
    sim = RacerSim(40, [name], start="anywhere", seed=1)
    begun, gates_passed, laps_at = sim.s.copy(), np.zeros(40, int), [[] for _ in range(40)]
    for tick in range(int(2.2 * track.length / 2)):
        old_x, old_y, checkpoint, lap = sim.x, sim.y, sim.checkpoint, sim.lap
        place = track.position(begun + 2.0 * (tick + 1))
        sim.x, sim.y = place[:, 0].copy(), place[:, 1].copy()
        sim.step_count = sim.step_count + 1
        with np.errstate(all="ignore"):
            sim.cross_gates(old_x, old_y)
        moved = (sim.checkpoint - checkpoint) % GATES
        assert (moved <= 1).all()
        gates_passed += moved
        for i in np.flatnonzero(sim.lap > lap):
            laps_at[i].append((gates_passed[i], begun[i] + 2.0 * (tick + 1)))
    assert all(len(laps) in (1, 2) for laps in laps_at)
    for i, laps in enumerate(laps_at):
        gates, travelled = laps[0]
        assert gates >= GATES  # a whole lap of gates was crossed
        assert track.length - 6 <= travelled - begun[i] <= 2 * track.length + 6
        assert (travelled + 6) % track.length <= 12, "it ends at the line"
        assert abs(sim.lap_ticks[i] - track.length / 2) <= 4


def test_a_car_placed_before_the_line_has_not_done_a_lap():
    sim, track = RacerSim(1), load_track("track-01")
    (x, y), t = track.position(np.array(-10.0)), track.tangent(np.array(-10.0))
    sim.place(np.array([0]), np.array([x]), np.array([y]), np.array([math.atan2(t[1], t[0])]), np.array([60.0]))
    assert sim.checkpoint[0] == GATES - 1
    for _ in range(30):
        sim.step(np.array([[0.0, 0.5, 0.0]]))
    assert sim.checkpoint[0] == 0 and sim.lap[0] == 1 and sim.lap_ticks[0] == 0 and sim.lap_start[0] > 0


def test_bad_arguments_are_refused():
    for arguments, message in (
        ({"num_cars": 0}, "at least 1 car"),
        ({"start": "pits"}, "unknown start 'pits'. Available: grid, anywhere"),
        ({"tracks": "track-01"}, "non-empty list"),
        ({"tracks": []}, "non-empty list"),
    ):
        with pytest.raises(ValueError, match=message):
            RacerSim(**arguments)
