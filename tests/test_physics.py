"""One tick of the car: worked out by hand, from injected states against the slow engine, and the state's way out and in."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import drive, hold_random_inputs
from slow_engine import SlowCar, SlowTrack

from racer_sim import DEFAULT_CONFIG, GATES, TRACKS, RacerSim, load_track

FULL_THROTTLE = np.array([[0.0, 1.0, 0.0]])


def test_first_tick_at_full_throttle_by_hand():
    sim = RacerSim(1)
    x = sim.x[0], sim.y[0]
    sim.step(FULL_THROTTLE)
    # throttle: 0 -> 1 by the share 1 - exp(-6/60) = 0.0951625820
    assert sim.throttle[0] == pytest.approx(0.0951625820, abs=1e-10)
    # force: 0.0951625820 * 55000 = 5233.94201; no resistance at rest; / 800 / 60 = 0.1090404585 units/s
    assert sim.speed[0] == pytest.approx(0.1090404585, abs=1e-9)
    # moved by speed / 60 = 0.001817340975
    assert math.dist(x, (sim.x[0], sim.y[0])) == pytest.approx(0.001817340975, abs=1e-11)


def test_a_tick_at_speed_by_hand():
    sim = RacerSim(1)
    start = load_track("track-01")
    (x, y), t = start.position(np.array(590.0)), start.tangent(np.array(590.0))  # on the road, on the far straight
    heading = math.atan2(t[1], t[0])
    sim.place(np.array([0]), np.array([x]), np.array([y]), np.array([heading]), np.array([60.0]))
    sim.step(np.array([[0.5, 1.0, 0.0]]))
    # steer: 0.5 * (1 - exp(-24/60)) = 0.1648399770; angle: -0.1648399770 * 0.37 / (1 + 0.025 * 60) = -0.0243963166
    assert sim.steer[0] == pytest.approx(0.1648399770, abs=1e-10)
    # rolled 60/60 = 1; turn: atan2(sin(angle), 1.5 + cos(angle) - 1) = atan2(-0.0243938966, 1.4997024245) = -0.0162643899
    assert sim.heading[0] - heading == pytest.approx(-0.0162643899, abs=1e-9)
    assert sim.yaw_rate[0] == pytest.approx(-0.0162643899 * 60, abs=1e-7)
    # force: 5233.94201 - (2 * 3600 + 150) = -2116.05799; new forward speed 60 - 2116.05799/48000 = 59.9559154
    # old velocity seen from the new heading: sideways 60 * sin(0.0162643899) = 0.9758203683
    # kept: 1 - (0.85 - 0.30 * 60/160) = 0.2625 -> 0.2561528467; speed = hypot(59.9559154, 0.2561528467) = 59.9564626
    assert sim.speed[0] == pytest.approx(59.9564626, abs=1e-6)


def test_braking_stops_the_car_and_it_stays():
    sim = RacerSim(1)
    for _ in range(60):
        sim.step(FULL_THROTTLE)
    fast = sim.speed[0]
    for _ in range(170):
        sim.step(np.array([[0.0, 0.0, 1.0]]))
    place = sim.x[0], sim.y[0]
    sim.step(np.array([[0.0, 0.0, 1.0]]))
    assert fast > 20
    assert sim.speed[0] < 0.02
    assert math.dist(place, (sim.x[0], sim.y[0])) < 1e-3


def test_positive_steer_turns_right():
    sim = RacerSim(2)
    for _ in range(60):
        sim.step(np.array([[1.0, 1.0, 0.0], [-1.0, 1.0, 0.0]]))
    assert sim.yaw_rate[0] < 0 < sim.yaw_rate[1]


def test_actions_outside_the_box_are_clamped():
    a, b = RacerSim(1), RacerSim(1)
    for _ in range(30):
        a.step(np.array([[7.0, 3.0, -2.0]]))
        b.step(np.array([[1.0, 1.0, 0.0]]))
    for name in RacerSim.STATE:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def inject(car: SlowCar, sim: RacerSim, i: int) -> None:
    for name in ("x", "y", "vx", "vy", "heading", "speed", "steer", "throttle", "brake", "checkpoint", "lap"):
        setattr(car, name, getattr(sim, name)[i].item())
    car.yaw, car.step_count, car.stillness = sim.yaw_rate[i].item(), int(sim.step_count[i]), int(sim.stillness[i])
    car.s, car.distance = car.track.project(car.x, car.y)


@pytest.mark.parametrize("name", TRACKS)
def test_one_step_from_injected_states_is_the_slow_engine_s(name):
    """States as they come up when 60 cars drive at random, each injected into the slow engine for one more step."""
    rng = np.random.default_rng(5)
    sim = RacerSim(60, [name], start="anywhere", seed=3)
    plans = np.stack([hold_random_inputs(rng, 240) for _ in range(60)], axis=1)  # (ticks, cars, 3)
    slow = SlowTrack(TRACKS[name])
    hits = 0
    for tick in range(240):
        sim.stillness[:] = 0
        if tick % 16 == 15:
            cars = [SlowCar(slow, DEFAULT_CONFIG) for _ in range(8)]
            chosen = rng.choice(60, 8, replace=False)
            for car, i in zip(cars, chosen, strict=True):
                inject(car, sim, i)
        observations, rewards, _, _ = sim.step(plans[tick])
        if tick % 16 == 15:
            for car, i in zip(cars, chosen, strict=True):
                observation, reward, _, _, info = car.step(plans[tick, i])
                np.testing.assert_allclose(observations[i, :12], observation[:12], atol=1e-9)
                assert abs(observations[i, 13] - observation[13]) < 2e-5
                assert abs(rewards[i] - reward) < 2e-4
                assert sim.wall_contact[i] == info["wallContact"]
                assert sim.checkpoint[i] == info["checkpoint"]
                hits += info["wallContact"]
    assert hits > 5, "the drivers were to hit walls"


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
    with pytest.raises(ValueError, match="lacks heading"):
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


def test_grid_start_counts_its_first_lap():
    sim = RacerSim(1)
    observations = sim.observe()
    for _ in range(900):
        observations, *_ = sim.step(drive(observations))
    assert sim.lap[0] >= 2
    assert 300 < sim.lap_ticks[0] < 900


def test_bad_arguments_are_refused():
    for arguments, message in (
        ({"num_cars": 0}, "at least 1 car"),
        ({"start": "pits"}, "unknown start 'pits'. Available: grid, anywhere"),
        ({"tracks": "track-01"}, "non-empty list"),
        ({"tracks": []}, "non-empty list"),
    ):
        with pytest.raises(ValueError, match=message):
            RacerSim(**arguments)
