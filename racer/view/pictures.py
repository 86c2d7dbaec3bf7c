"""Pictures of the race: a track seen from above, cars on it, a lap as a racing line and as an animated replay. Needs Pillow.

    picture = draw_lap("track-01", trajectory)              # a lap as a racing line
    gif = draw_lap("track-01", trajectory, replay=True)     # the same lap, driven again in real time

    1  Painter      one track: runoff, shoulder, road, walls, start line, cars
    2  Camera       what render() shows: the cars of a simulation and their trails
    3  a lap        coloured by speed as a racing line, or driven again in real time as a replay with its inputs

y points up, as in the game.
"""

from __future__ import annotations

import functools
import io
import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from racer.game.cars import EmbeddedCars
from racer.game.rules import MAX_SPEED, SHOULDER_WIDTH, TICKS_PER_SECOND
from racer.game.sim import RacerSim
from racer.game.track import Track
from racer.game.tracks import load_track

PICTURE_SIZE = 800  # pixels along the longer side of a track
REPLAY_SIZE = 480
SCALE = 2  # pictures are drawn at this many times their size and reduced at the end, so that lines are smooth
TRAIL_TICKS = 150
COLOURS = {
    "ground": (52, 84, 58),
    "runoff": (196, 178, 132),
    "shoulder": (156, 148, 124),
    "road": (62, 64, 70),
    "edge": (238, 238, 232),
    "centreline": (96, 98, 104),
    "wall": (178, 52, 46),
    "car": (255, 206, 40),
    "outline": (24, 24, 26),
    "trail": (255, 226, 130),
    "text": (255, 255, 255),
    "steer": (255, 206, 40),
    "throttle": (96, 190, 98),
    "brake": (222, 74, 62),
}
# From slow to fast.
SPEED_COLOURS = np.array(
    [(68, 40, 130), (47, 108, 178), (31, 161, 135), (140, 205, 70), (253, 231, 37), (255, 130, 40)]
)
SPEED_RANGE = (60.0, MAX_SPEED)  # units/s, from the first colour to the last
GIF_FRAME_TICKS = 3  # 50 ms: a GIF counts in hundredths of a second
GIF_MAX_SECONDS = 20

# == 1  Painter ========================================================================================================


class Painter:
    """Pictures of one track, and of what is drawn on it."""

    def __init__(self, track: Track, size: int = PICTURE_SIZE):
        self.track = track
        self.low, self.high = track.outer.min(0) - 20, track.outer.max(0) + 20
        self.zoom = SCALE * size / float((self.high - self.low).max())
        width, height = (math.ceil(v / SCALE) * SCALE for v in (self.high - self.low) * self.zoom)
        self.base = Image.new("RGB", (width, height), COLOURS["ground"])
        pen = ImageDraw.Draw(self.base)
        self._paint_surfaces(pen)
        self._paint_lines(pen)
        self._paint_start(pen)

    def to_pixels(self, points) -> list[tuple[float, float]]:
        points = np.asarray(points, dtype=np.float64).reshape(-1, 2)
        x, y = (points[:, 0] - self.low[0]) * self.zoom, (self.high[1] - points[:, 1]) * self.zoom
        return list(zip(x, y, strict=True))

    def _paint_surfaces(self, pen) -> None:
        track = self.track
        pen.polygon(self.to_pixels(track.outer), fill=COLOURS["runoff"])
        s = np.linspace(0, track.length, math.ceil(track.length / 3))
        centre, tangent = track.position(s), track.tangent(s)
        normal = np.stack([-tangent[:, 1], tangent[:, 0]], axis=1)
        left, right = (np.interp(s, track.wall_s, w, period=track.length) for w in (track.road_left, track.road_right))
        for name, extra in (("shoulder", SHOULDER_WIDTH), ("edge", 1.5), ("road", 0.0)):
            a, b = (
                self.to_pixels(centre + side * (width + extra)[:, None] * normal)
                for side, width in ((1, left), (-1, right))
            )
            for quad in zip(a, a[1:], b[1:], b, strict=False):
                pen.polygon(list(quad), fill=COLOURS[name])
        pen.polygon(self.to_pixels(track.inner), fill=COLOURS["ground"])
        # The shoulder was painted across the outer wall in places; out there is ground.
        outside = Image.new("L", self.base.size, 255)
        ImageDraw.Draw(outside).polygon(self.to_pixels(track.outer), fill=0)
        self.base.paste(COLOURS["ground"], mask=outside)

    def _paint_lines(self, pen) -> None:
        for begin in np.arange(0, self.track.length, 12.0):
            dash = self.track.position(begin + np.linspace(0, 5, 4))
            pen.line(self.to_pixels(dash), fill=COLOURS["centreline"], width=SCALE)
        for wall in (self.track.outer, self.track.inner):
            closed = self.to_pixels(np.append(wall, wall[:1], axis=0))
            pen.line(closed, fill=COLOURS["wall"], width=round(2.2 * SCALE), joint="curve")

    def _paint_start(self, pen) -> None:
        """A chequered line across the road."""
        centre, tangent = self.track.position(np.array(0.0)), self.track.tangent(np.array(0.0))
        normal, half = np.array([-tangent[1], tangent[0]]), float(self.track.half_width(0.0))
        squares, rows = 12, 3
        side = 2 * half / squares
        for i in range(squares):
            for j in range(rows):
                corner = centre + normal * (i * side - half) + tangent * (j - rows / 2) * side
                across, along = normal * side, tangent * side
                square = [corner, corner + across, corner + across + along, corner + along]
                pen.polygon(self.to_pixels(square), fill=(245, 245, 245) if (i + j) % 2 else (20, 20, 20))

    def canvas(self):
        """A fresh picture of the track, SCALE times as large as it will be, and a pen to draw on it."""
        image = self.base.copy()
        return image, ImageDraw.Draw(image)

    def picture(self, x: float, y: float, heading: float, trail=()) -> np.ndarray:
        """The track with a car and its trail. -> (H, W, 3) uint8"""
        image, pen = self.canvas()
        way = self.to_pixels(trail) if len(trail) > 1 else []
        for i, (a, b) in enumerate(zip(way, way[1:], strict=False)):
            fade = (i + 1) / len(way)
            colour = tuple(round(r + (t - r) * fade) for r, t in zip(COLOURS["road"], COLOURS["trail"], strict=True))
            pen.line((*a, *b), fill=colour, width=round((1 + 1.5 * fade) * SCALE))
        self.paint_car(pen, x, y, heading)
        return np.array(image.reduce(SCALE))

    def paint_car(self, pen, x: float, y: float, heading: float) -> None:
        """An arrowhead along the heading, larger than the car (a disc of radius 1), so that it can be seen."""
        along = np.array([math.cos(heading), math.sin(heading)])
        left = np.array([-along[1], along[0]])
        unit = 7.0 * SCALE / self.zoom
        for grow, colour in ((1.35, "outline"), (1.0, "car")):
            shape = [(2.0, 0.0), (-1.3, 1.15), (-0.7, 0.0), (-1.3, -1.15)]
            corners = [np.array([x, y]) + unit * grow * (a * along + b * left) for a, b in shape]
            pen.polygon(self.to_pixels(corners), fill=COLOURS[colour])


painter_of = functools.lru_cache(maxsize=32)(Painter)  # painting a track is slow


# == 2  Camera =========================================================================================================


class Camera:
    """Where the cars are and have been. The bridge does not send positions, so an embedded twin drives along there."""

    PLACE = ("x", "y", "heading", "speed", "steer", "throttle", "brake")

    def __init__(self, sim: RacerSim, is_twin: bool):
        self.sim, self.is_twin = sim, is_twin
        # Per car, of this episode and of the last complete one, at the start and after every tick: x, y, heading, speed, and
        # the car's smoothed inputs: steer, throttle, brake.
        self.places: list[list[tuple]] = [[] for _ in range(sim.num_cars)]
        self.last_episode: list[list[tuple]] = [[] for _ in range(sim.num_cars)]

    def reset(self, cars) -> None:
        if self.is_twin:
            self.sim.reset(cars)
        for i in cars:
            self.last_episode[i], self.places[i] = self.places[i], [self._place(i)]

    def follow(self, actions, cars) -> None:
        """After a tick: `cars` are still in their episodes."""
        if self.is_twin:
            self.sim.step(actions, observing=False)
        for i in cars:
            self.places[i].append(self._place(i))

    def _place(self, car: int) -> tuple:
        return tuple(getattr(self.sim, name)[car] for name in self.PLACE)

    def picture(self, car: int) -> np.ndarray:
        x, y, heading, *_ = self._place(car)
        trail = [place[:2] for place in self.places[car][-TRAIL_TICKS:]]
        return painter_of(self.sim.world.tracks[self.sim.track[car]]).picture(x, y, heading, trail)


def make_camera(cars, config: dict) -> Camera:
    """It watches embedded cars, or embedded twins of cars on a bridge."""
    if isinstance(cars, EmbeddedCars):
        return Camera(cars.sim, is_twin=False)
    return Camera(RacerSim(len(cars.track_ids), cars.track_ids, config), is_twin=True)


# == 3  A lap ==========================================================================================================


def draw_lap(track_id: str, trajectory: np.ndarray, replay: bool = False):
    """A lap from the trajectory (T + 1, 7) of its car (see Camera). -> (H, W, 3) uint8, or its replay as an encoded GIF"""
    track = load_track(track_id)
    return (
        lap_replay(painter_of(track, REPLAY_SIZE), trajectory) if replay else racing_line(painter_of(track), trajectory)
    )


def save_picture(path: Path, picture: np.ndarray) -> None:
    Image.fromarray(picture).save(path)


def speed_colour(speed: float) -> tuple[int, int, int]:
    """The same scale in all pictures, so that they can be compared; the last colour is the top speed."""
    slow, fast = SPEED_RANGE
    place = min(max((speed - slow) / (fast - slow), 0.0), 1.0) * (len(SPEED_COLOURS) - 1)
    low = min(int(place), len(SPEED_COLOURS) - 2)
    colour = SPEED_COLOURS[low] + (SPEED_COLOURS[low + 1] - SPEED_COLOURS[low]) * (place - low)
    return tuple(int(c) for c in colour)


def racing_line(painter: Painter, places: np.ndarray) -> np.ndarray:
    """A lap on its track, coloured by speed. -> (H, W, 3) uint8"""
    image, pen = painter.canvas()
    _paint_way(painter, pen, places)
    picture, pen, unit = _with_caption(image.reduce(SCALE))
    pen.text((unit, picture.height - 4.2 * unit), f"{painter.track.name}  {_seconds(places)}", **_letters(2.9 * unit))
    left, top, width = picture.width - 21 * unit, picture.height - 4.2 * unit, round(20 * unit)
    for i in range(width):
        speed = SPEED_RANGE[0] + (SPEED_RANGE[1] - SPEED_RANGE[0]) * i / width
        pen.line((left + i, top, left + i, top + 1.2 * unit), fill=speed_colour(speed))
    pen.text((left, top + 1.4 * unit), f"{SPEED_RANGE[0]:.0f} to {SPEED_RANGE[1]:.0f} units/s", **_letters(2.3 * unit))
    return np.asarray(picture)


def _paint_way(painter: Painter, pen, places: np.ndarray) -> None:
    way = painter.to_pixels(places[:, :2])
    for a, b, place in zip(way, way[1:], places, strict=False):
        pen.line((*a, *b), fill=speed_colour(place[3]), width=7)


def _with_caption(picture: Image.Image):
    """The picture with a caption strip below it: picture, pen, and the strip's unit of size. Readable at a third of its size."""
    unit = picture.width / 60
    larger = Image.new("RGB", (picture.width, picture.height + round(5 * unit)), COLOURS["outline"])
    larger.paste(picture)
    return larger, ImageDraw.Draw(larger), unit


def _letters(size: float) -> dict:
    return {"font": ImageFont.load_default(size=size), "fill": COLOURS["text"]}


def _seconds(places: np.ndarray) -> str:
    return f"{(len(places) - 1) / TICKS_PER_SECOND:.3f} s"


def lap_replay(painter: Painter, places: np.ndarray) -> bytes:
    """A lap as an animated GIF in real time: the car drives, its line stays behind it; time, speed, inputs. -> the encoded file"""
    image, pen = painter.canvas()
    most_frames = GIF_MAX_SECONDS * TICKS_PER_SECOND // GIF_FRAME_TICKS
    every = max(GIF_FRAME_TICKS, math.ceil(len(places) / most_frames))
    frames, palette = [], None
    for end in range(every, len(places), every):
        _paint_way(painter, pen, places[end - every : end + 1])
        frame = image.copy()
        painter.paint_car(ImageDraw.Draw(frame), *places[end, :3])
        frame = _with_inputs(frame.reduce(SCALE), places[: end + 1])
        if palette is None:  # one palette for all, of the track with every colour of speed on it
            swatches = frame.copy()
            for i, speed in enumerate(np.linspace(*SPEED_RANGE, 64)):
                swatches.paste(speed_colour(speed), (i * 4, 0, i * 4 + 4, 8))
            palette = swatches.quantize(128)
        frames.append(frame.quantize(palette=palette, dither=Image.Dither.NONE))
    out = io.BytesIO()
    duration_ms = round(1000 * every / TICKS_PER_SECOND / 10) * 10
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], duration=duration_ms, loop=0)
    return out.getvalue()


def _with_inputs(picture: Image.Image, places: np.ndarray) -> Image.Image:
    """The current time and speed, and bars: steering to either side of the middle, throttle and brake from the left."""
    picture, pen, unit = _with_caption(picture)
    speed, steer, throttle, brake = places[-1, 3:]
    pen.text((unit, picture.height - 4.6 * unit), f"{_seconds(places)}  {speed:3.0f}/s", **_letters(3.4 * unit))
    left, width = picture.width - 20 * unit, 19 * unit
    bars = (("steer", 0.5, 0.5 + steer / 2), ("throttle", 0.0, throttle), ("brake", 0.0, brake))
    for row, (name, begin, end) in enumerate(bars):
        top = picture.height - (4.4 - 1.4 * row) * unit
        begin, end = (left + width * share for share in sorted((begin, end)))
        pen.rectangle((left, top, left + width, top + unit), fill=COLOURS["road"])
        pen.rectangle((begin, top, end, top + unit), fill=COLOURS[name])
        pen.text((left - unit / 2, top + unit / 2), name, anchor="rm", **_letters(1.5 * unit))
    return picture
