"""Pictures of the race: a track seen from above, cars on it, a lap as a racing line and as an animated replay. Needs Pillow.

    picture = draw_laps([lap, best_known_lap("track-01")])          # a lap as a racing line, beside a ghost
    gif = draw_laps([lap], replay=True)                             # the same lap, driven again in real time

    1  Painter      one track: runoff, shoulder, road, walls, start line, cars
    2  laps         as a racing line, coloured by the time lost against another lap, or driven again as a replay

y points up, as in the game.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from racer.game.rules import MAX_SPEED, SHOULDER_WIDTH, TICKS_PER_SECOND
from racer.game.track import Track
from racer.game.tracks import load_track
from racer.view.telemetry import LapTrace, Race

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
SPEED_COLOURS = np.array([(68, 40, 130), (47, 108, 178), (31, 161, 135), (140, 205, 70), (253, 231, 37), (255, 130, 40)])
# From gain to loss. No driver has one of these colours.
LOSS_COLOURS = np.array([(60, 170, 90), (170, 225, 170), (235, 235, 225), (205, 170, 220), (170, 60, 190)])
DRIVER_COLOURS = (  # by Race.colour, as in the page's dark theme
    (74, 168, 232), (255, 138, 61), (154, 163, 173), (242, 243, 245), (165, 220, 255), (224, 195, 74),
)  # fmt: skip
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
        centre, normal, left, right = track.road(s)
        for name, extra in (("shoulder", SHOULDER_WIDTH), ("edge", 1.5), ("road", 0.0)):
            a, b = (
                self.to_pixels(centre + side * (width + extra)[:, None] * normal) for side, width in ((1, left), (-1, right))
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

    def paint_car(self, pen, x: float, y: float, heading: float, colour=COLOURS["car"]) -> None:
        """An arrowhead, larger than the car (a disc of radius 1), so that it can be seen."""
        self.paint_arrow(pen, x, y, heading, COLOURS["outline"], 1.35)
        self.paint_arrow(pen, x, y, heading, colour, 1.0)

    def paint_arrow(self, pen, x: float, y: float, heading: float, colour, size: float) -> None:
        along = np.array([math.cos(heading), math.sin(heading)])
        left, unit = np.array([-along[1], along[0]]), 7.0 * size * SCALE / self.zoom
        shape = [(2.0, 0.0), (-1.3, 1.15), (-0.7, 0.0), (-1.3, -1.15)]
        pen.polygon(self.to_pixels([(x, y) + unit * (a * along + b * left) for a, b in shape]), fill=colour)


painter_of = functools.lru_cache(maxsize=8)(Painter)  # painting a track is slow


def car_picture(track: Track, places: Sequence[tuple]) -> np.ndarray:
    """What render() shows: a car where its places (x, y, heading, ...) end, and its trail. -> (H, W, 3) uint8"""
    return painter_of(track).picture(*places[-1][:3], [place[:2] for place in places[-TRAIL_TICKS:]])


# == 2  Laps ===========================================================================================================


def draw_laps(laps: Sequence[LapTrace], replay: bool = False):
    """The first lap, and the others as ghosts. -> (H, W, 3) uint8, or an animated GIF in real time, encoded

    The first one is coloured by the time that it loses against the second, or by its speed if there is no other.
    """
    track = load_track(laps[0].track_id)
    return lap_replay(painter_of(track, REPLAY_SIZE), laps) if replay else racing_line(painter_of(track), laps)


def save_picture(path: Path, picture: np.ndarray) -> None:
    Image.fromarray(picture).save(path, format="PNG")


class Colouring:
    """The colour of a lap at every tick, and its scale: what stands at its ends."""

    def __init__(self, laps: Sequence[LapTrace]):
        lap = laps[0]
        if len(laps) > 1:
            values = lap.lost_to(laps[1])
            most = max(0.2, float(np.abs(values).max()))
            self.ramp, self.shares, self.ends = LOSS_COLOURS, (values + most) / (2 * most), ("gains time", "loses time")
        else:
            low, high = SPEED_RANGE
            self.ramp, self.shares = SPEED_COLOURS, (lap.columns["speed"] - low) / (high - low)
            self.ends = (f"{low:.0f}", f"{high:.0f} units/s")

    def at(self, share: float) -> tuple[int, int, int]:
        place = min(max(float(share), 0.0), 1.0) * (len(self.ramp) - 1)
        low = min(int(place), len(self.ramp) - 2)
        return tuple(int(c) for c in self.ramp[low] + (self.ramp[low + 1] - self.ramp[low]) * (place - low))


def racing_line(painter: Painter, laps: Sequence[LapTrace]) -> np.ndarray:
    image, pen = painter.canvas()
    colouring = Colouring(laps)
    _paint_ghosts(painter, pen, laps)
    _paint_way(painter, pen, laps[0], colouring, 0, len(laps[0].progress) - 1)
    _paint_direction(painter, pen, laps[0])
    picture, pen, unit = _with_caption(image.reduce(SCALE), 5 + 2.8 * (len(laps) > 1))
    top = painter.base.height / SCALE + 0.8 * unit
    pen.text((unit, top), f"{painter.track.name}  {_seconds(laps[0])}", **_letters(2.9 * unit))
    for i, (lap, colour) in enumerate(list(zip(laps, driver_colours(laps), strict=True))[1:6]):
        letters = _letters(2.2 * unit) | {"fill": colour}
        pen.text((unit + 27 * unit * i, top + 4 * unit), f"{lap.name}  {_seconds(lap)}", **letters)
    left, width = picture.width - 21 * unit, round(20 * unit)
    for i in range(width):
        pen.line((left + i, top, left + i, top + 1.2 * unit), fill=colouring.at(i / width))
    for x, anchor, text in ((left, "la", colouring.ends[0]), (left + width, "ra", colouring.ends[1])):
        pen.text((x, top + 1.4 * unit), text, anchor=anchor, **_letters(2.0 * unit))
    return np.asarray(picture)


def _paint_way(painter: Painter, pen, lap: LapTrace, colouring: Colouring, begin: int, end: int) -> None:
    way = painter.to_pixels(np.stack([lap.columns["x"], lap.columns["y"]], axis=1)[begin : end + 1])
    for a, b, share in zip(way, way[1:], colouring.shares[begin:], strict=False):
        pen.line((*a, *b), fill=colouring.at(share), width=7)


def _paint_ghosts(painter: Painter, pen, laps: Sequence[LapTrace]) -> None:
    for lap, colour in reversed(list(zip(laps, driver_colours(laps), strict=True))[1:6]):
        pen.line(painter.to_pixels(np.stack([lap.columns["x"], lap.columns["y"]], axis=1)), fill=colour, width=3)


def driver_colours(laps: Sequence[LapTrace]) -> list[tuple[int, int, int]]:
    race = Race(laps)
    return [DRIVER_COLOURS[race.colour(lap)] for lap in laps]


def _paint_direction(painter: Painter, pen, lap: LapTrace) -> None:
    """Arrowheads along the line, which way the car goes."""
    for share in (np.arange(8) + 0.5) / 8:
        tick = min(int(np.searchsorted(lap.progress, share)), len(lap.progress) - 1)
        x, y, heading = (lap.columns[name][tick] for name in ("x", "y", "heading"))
        painter.paint_arrow(pen, x, y, heading, COLOURS["text"], 0.8)


def _with_caption(picture: Image.Image, units: float = 5):
    """The picture with a caption strip below it: picture, pen, and the strip's unit of size. Readable at a third of its size."""
    unit = picture.width / 60
    larger = Image.new("RGB", (picture.width, picture.height + round(units * unit)), COLOURS["outline"])
    larger.paste(picture)
    return larger, ImageDraw.Draw(larger), unit


_font = functools.lru_cache(ImageFont.load_default)


def _letters(size: float) -> dict:
    return {"font": _font(size), "fill": COLOURS["text"]}


def _seconds(lap: LapTrace) -> str:
    return f"{lap.seconds:.3f} s" if lap.complete else "no lap"


def lap_replay(painter: Painter, laps: Sequence[LapTrace]) -> bytes:
    """The cars drive, the line of the first stays behind it; time, speed, inputs."""
    image, pen = painter.canvas()
    colouring, last = Colouring(laps), max(len(lap.progress) for lap in laps) - 1
    _paint_ghosts(painter, pen, laps)
    every = max(GIF_FRAME_TICKS, math.ceil(last / (GIF_MAX_SECONDS * TICKS_PER_SECOND // GIF_FRAME_TICKS)))
    frames, palette, colours = [], None, driver_colours(laps)
    for tick in range(every, last + 1, every):
        _paint_way(painter, pen, laps[0], colouring, tick - every, min(tick, len(laps[0].progress) - 1))
        frame = image.copy()
        for lap, colour in reversed(list(zip(laps, colours, strict=False))):
            at = min(tick, len(lap.progress) - 1)
            painter.paint_car(ImageDraw.Draw(frame), *(lap.columns[name][at] for name in ("x", "y", "heading")), colour)
        frame = _with_inputs(frame.reduce(SCALE), laps[0], tick)
        if palette is None:  # one palette for all, of the track with every colour on it
            swatches = frame.copy()
            for i in range(64):
                swatches.paste(colouring.at(i / 63), (i * 4, 0, i * 4 + 4, 8))
            for i, colour in enumerate(colours):
                swatches.paste(colour, (i * 8, 8, i * 8 + 8, 16))
            palette = swatches.quantize(128)
        frames.append(frame.quantize(palette=palette, dither=Image.Dither.NONE))
    out = io.BytesIO()
    # A GIF counts in hundredths of a second: frames take turns being a little short and a little long.
    ends = np.rint(np.arange(len(frames) + 1) * 100 * every / TICKS_PER_SECOND)
    durations_ms = (10 * np.diff(ends)).astype(int).tolist()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], duration=durations_ms, loop=0)
    return out.getvalue()


def _with_inputs(picture: Image.Image, lap: LapTrace, tick: int) -> Image.Image:
    """The current time and speed, and bars: steering to either side of the middle, throttle and brake from the left."""
    picture, pen, unit = _with_caption(picture)
    at = min(tick, len(lap.progress) - 1)
    speed, steer, throttle, brake = (lap.columns[name][at] for name in ("speed", "steer", "throttle", "brake"))
    text = f"{tick / TICKS_PER_SECOND:.3f} s  {speed:3.0f}/s" if at == tick else _seconds(lap)
    pen.text((unit, picture.height - 4.6 * unit), text, **_letters(3.4 * unit))
    left, width = picture.width - 20 * unit, 19 * unit
    bars = (("steer", 0.5, 0.5 + steer / 2), ("throttle", 0.0, throttle), ("brake", 0.0, brake))
    for row, (name, begin, end) in enumerate(bars):
        top = picture.height - (4.4 - 1.4 * row) * unit
        begin, end = (left + width * share for share in sorted((begin, end)))
        pen.rectangle((left, top, left + width, top + unit), fill=COLOURS["road"])
        pen.rectangle((begin, top, end, top + unit), fill=COLOURS[name])
        pen.text((left - unit / 2, top + unit / 2), name, anchor="rm", **_letters(1.5 * unit))
    return picture
