"""Pictures: what render() shows, racing lines, replays, and where a car was."""

from __future__ import annotations

import io

import numpy as np
import pytest
from conftest import drive, short_episodes

from racer.game.rules import TICKS_PER_SECOND
from racer.game.sim import RacerSim
from racer.game.tracks import TRACKS, load_track
from racer.training.references import best_known_lap
from racer.view import pictures as racer_view
from racer.view.pictures import SCALE, Colouring, Painter, draw_laps, lap_replay, racing_line
from racer.view.telemetry import LapTrace
from racer_env import RacerEnv, RacerVectorEnv


@pytest.mark.parametrize("track", TRACKS)
def test_render_shows_the_track_and_the_car(track):
    env = RacerEnv(track, render_mode="rgb_array")
    observation, _ = env.reset(seed=1)
    first = env.render()
    assert first.flags.writeable and first.dtype == np.uint8 and first.ndim == 3 and max(first.shape[:2]) <= 801
    for name in ("road", "shoulder", "ground", "car"):
        share = (np.abs(first.astype(int) - racer_view.COLOURS[name]).max(2) <= 2).mean()
        assert share > (0.0001 if name == "car" else 0.05), name
    for _ in range(60):
        observation, *_ = env.step(drive(observation[None])[0])
    assert not np.array_equal(first, env.render()), "the car has moved"


def test_vector_render_gives_a_picture_per_car():
    envs = RacerVectorEnv(3, ["track-01", "track-02", "track-03"], render_mode="rgb_array")
    envs.reset(seed=0)
    envs.step(np.tile([0.0, 1.0, 0.0], (3, 1)))
    pictures = envs.render()
    assert len(pictures) == 3 and len({p.shape for p in pictures}) == 3


def test_render_without_a_mode_warns_and_returns_nothing():
    env = RacerEnv()
    env.reset()
    with pytest.warns(UserWarning, match="rgb_array"):
        assert env.render() is None


@pytest.fixture(scope="module")
def lap():
    """A track, and places along it: faster and slower, steering right, with half throttle."""
    track, s = load_track("track-03"), np.linspace(0, load_track("track-03").length, 400)
    heading, speed = np.arctan2(*track.tangent(s).T[::-1]), 110 + 45 * np.sin(np.linspace(0, 6, 400))
    inputs = np.broadcast_to([[1.0], [0.5], [0.0]], (3, 400))
    return Painter(track), LapTrace.of("mine", "track-03", np.column_stack([track.position(s), heading, speed, *inputs]))


def test_racing_line_is_coloured_by_speed_and_carries_its_title(lap):
    painter, mine = lap
    places, speed = np.column_stack([mine.columns["x"], mine.columns["y"]]), mine.columns["speed"]
    plain = np.asarray(painter.canvas()[0].reduce(SCALE)).astype(int)
    picture = racing_line(painter, [mine]).astype(int)
    assert picture.shape[1] == plain.shape[1] and picture.shape[0] > plain.shape[0], "a strip for the caption"
    for i in (speed.argmax(), speed.argmin()):
        place = tuple(int(v / SCALE) for v in painter.to_pixels(places[i])[0])[::-1]
        assert np.abs(picture[place] - Colouring([mine]).at((speed[i] - 60) / 100)).max() < 60
    line = picture[: len(plain)]
    assert (np.abs(line - plain).max(2) > 40).sum() > 2000
    caption = picture[len(plain) :]
    assert len(caption) > picture.shape[1] / 15, "readable at a third of its size, as TensorBoard shows it first"
    assert (caption.min(2) > 200).sum() > 500, "letters"


def test_colours_mean_the_same_speed_in_every_picture():
    """A car at top speed all the way looks like one, and a slow one does not."""
    best = best_known_lap("track-01")
    colouring, (slowest, *_, fastest) = Colouring([best]), racer_view.SPEED_COLOURS.tolist()
    assert (np.ptp(best.columns["speed"]) < 1) and list(colouring.at(colouring.shares[50])) == fastest
    assert list(colouring.at(0.0)) == list(colouring.at(-3.0)) == slowest


def test_beside_another_lap_the_line_shows_where_it_loses_time():
    best = best_known_lap("track-03")
    slow = {
        **best.columns,
        **{name: np.repeat(best.columns[name], 2) for name in ("x", "y", "arc", "heading", "speed")},
    }
    slow = LapTrace("slow", "track-03", {name: np.resize(values, len(slow["x"])) for name, values in slow.items()})
    colouring = Colouring([slow, best])
    gains, loses = colouring.at(0.0), colouring.at(1.0)
    assert colouring.ends == ("gains time", "loses time") and loses[0] > gains[0] and loses[1] < gains[1]
    assert colouring.shares[20:-20].min() > 0.75, "everywhere it takes twice as long"
    with_ghost, alone = draw_laps([best, slow]), draw_laps([best])
    assert with_ghost.shape[0] > alone.shape[0] and len(draw_laps([slow, best], replay=True)) > 10_000


def gif_seconds(gif) -> float:
    total = 0
    for i in range(gif.n_frames):
        gif.seek(i)
        total += gif.info["duration"]
    return total / 1000


def test_a_long_lap_is_replayed_in_real_time_too(lap):
    """With fewer frames a second; a GIF counts in hundredths of a second."""
    from PIL import Image

    painter, mine = lap
    columns = {name: np.repeat(values, 4) for name, values in mine.columns.items()}
    gif = Image.open(io.BytesIO(lap_replay(Painter(painter.track, 120), [LapTrace("slow", "track-03", columns)])))
    assert gif_seconds(gif) == pytest.approx(1600 / TICKS_PER_SECOND, rel=0.01)


def test_replay_is_an_animation_in_real_time_with_the_inputs(lap):
    from PIL import Image

    painter, mine = lap
    gif = Image.open(io.BytesIO(lap_replay(Painter(painter.track, 240), [mine])))
    assert gif.format == "GIF" and gif.n_frames == 133 and gif.size[0] <= 242
    assert gif_seconds(gif) == pytest.approx(400 / TICKS_PER_SECOND, rel=0.01)
    frames = []
    for i in (10, 60):
        gif.seek(i)
        frames.append(np.asarray(gif.convert("RGB")).astype(int))
    unit = gif.size[0] / 60
    strip = round(gif.size[1] - 5 * unit)
    assert np.abs(frames[0] - frames[1])[:strip].max() > 100, "the car moves"
    assert np.abs(frames[0] - frames[1])[strip:, : gif.size[0] // 2].max() > 100, "the clock runs"

    def colour(row, share):
        x, y = gif.size[0] - 20 * unit + share * 19 * unit, gif.size[1] - (4.4 - 1.4 * row - 0.5) * unit
        return frames[1][int(y), int(x)]

    shown = [("steer", 0, 0.75), ("road", 0, 0.25), ("throttle", 1, 0.25), ("road", 1, 0.75), ("road", 2, 0.25)]
    for name, row, share in shown:  # steer is to the right, the throttle half open, the brake off
        assert np.abs(colour(row, share) - racer_view.COLOURS[name]).max() < 30, (name, row, share)


@pytest.mark.parametrize("repeat", [1, 4])
def test_the_places_of_an_episode_are_where_the_engine_had_the_car(repeat, tmp_path):
    """Also where the episode ends before all ticks of an action are driven."""
    config = short_episodes(tmp_path, 90)
    envs = RacerVectorEnv(2, "track-02", config, render_mode="rgb_array", action_repeat=repeat)
    observations, _ = envs.reset(seed=0)
    sim = RacerSim(2, ["track-02"])
    place = lambda: [getattr(sim, name)[1] for name in ("x", "y", "heading", "speed", "steer", "throttle", "brake")]  # noqa: E731
    expected = [place()]
    while len(expected) <= 90:
        actions = drive(observations)
        actions[0] = 0
        observations, *_ = envs.step(actions)
        for _ in range(min(repeat, 91 - len(expected))):
            sim.step(actions, observing=False)
            expected.append(place())
    places = envs.trajectory(1, last_episode=True)
    np.testing.assert_array_equal(places, expected)
    assert np.ptp(envs.trajectory(0, last_episode=True)[:, 0]) == 0, "this one stood still"
    lap = LapTrace.of("", "track-02", places)
    assert draw_laps([lap]).shape[2] == 3 and draw_laps([lap], replay=True)[:4] == b"GIF8"
