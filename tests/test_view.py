"""Pictures: what render() shows, racing lines, replays, and where a car was."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from conftest import drive

import racer_view
from racer_env import RacerEnv, RacerVectorEnv
from racer_sim import TICKS_PER_SECOND, TRACKS, RacerSim, load_track
from racer_view import SCALE, Painter, draw_lap, lap_replay, racing_line


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
    track = load_track("track-03")
    positions = track.position(np.linspace(0, track.length, 400))
    tangents = track.tangent(np.linspace(0, track.length, 400))
    speeds = 100 + 50 * np.sin(np.linspace(0, 6, 400))
    return Painter(track), positions, np.arctan2(tangents[:, 1], tangents[:, 0]), speeds


def test_racing_line_is_coloured_by_speed_and_carries_its_title(lap):
    painter, positions, _, speeds = lap
    plain = np.asarray(painter.canvas()[0].reduce(SCALE)).astype(int)
    picture = racing_line(painter, positions, speeds, "track-03  17.000 s").astype(int)
    assert picture.shape == plain.shape
    place = lambda i: tuple(int(v / SCALE) for v in painter.to_pixels(positions[i])[0])[::-1]  # noqa: E731
    for i in (int(speeds.argmax()), int(speeds.argmin())):
        expected = racer_view.speed_colour((speeds[i] - speeds.min()) / np.ptp(speeds))
        assert np.abs(picture[place(i)] - expected).max() < 60
    assert (np.abs(picture - plain).max(2) > 40).sum() > 2000
    without_title = racing_line(painter, positions, speeds, "").astype(int)
    assert (np.abs(picture - without_title).max(2) > 40).sum() > 200, "the title is readable"


def test_a_lap_at_one_speed_is_not_drawn_as_slow():
    low, high = racer_view.speed_range([160.0, 159.9])
    assert high == 160.0 and low == 120.0


def test_replay_is_an_animation_in_real_time(lap):
    from PIL import Image

    painter, positions, headings, speeds = lap
    gif = Image.open(io.BytesIO(lap_replay(Painter(painter.track, 240), positions, headings, speeds)))
    assert gif.format == "GIF" and gif.n_frames == 133 and max(gif.size) <= 242
    assert gif.n_frames * gif.info["duration"] / 1000 == pytest.approx(400 / TICKS_PER_SECOND, rel=0.01)
    frames = []
    for i in (10, 60):
        gif.seek(i)
        frames.append(np.asarray(gif.convert("RGB")).astype(int))
    assert np.abs(frames[0] - frames[1]).max() > 100, "the car moves"


@pytest.mark.parametrize("on_bridge", [False, True])
def test_the_places_of_an_episode_are_where_the_engine_had_the_car(on_bridge, good_bridge, tmp_path):
    """On a bridge, which does not say where a car is, a twin drives along."""
    config = tmp_path / "short.json"
    config.write_text((Path(__file__).parent.parent / "ai-config.json").read_text().replace("3000", "90"))
    url = good_bridge.url if on_bridge else None
    envs = RacerVectorEnv(2, "track-02", config, url, render_mode="rgb_array")
    observations, _ = envs.reset(seed=0)
    sim = RacerSim(2, ["track-02"])
    expected = [(sim.x[1], sim.y[1], sim.heading[1], sim.speed[1])]
    for _ in range(90):
        actions = drive(observations)
        actions[0] = 0
        observations, *_ = envs.step(actions)
        sim.step(actions, observe=False)
        expected.append((sim.x[1], sim.y[1], sim.heading[1], sim.speed[1]))
    places = envs.places(1, last_episode=True)
    np.testing.assert_array_equal(places, expected)
    assert np.ptp(envs.places(0, last_episode=True)[:, 0]) == 0, "this one stood still"
    assert draw_lap("track-02", places).shape[2] == 3 and draw_lap("track-02", places, replay=True)[:4] == b"GIF8"
    envs.close()
