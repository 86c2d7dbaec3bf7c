"""Laps as columns, and what they say beside each other: where was the time lost?

    lap = Lap.of("mine", "track-01", trajectory)        # places (T + 1, 7), one a tick, as Camera records them
    save_laps(Path("lap.csv"), [lap])
    race = Race([lap, best_known_lap("track-01")])
    print(race.table())

Shares run from 0, where a lap begins, to 1, where it ends: the tick after the line and the one after the next line. So sector
times add up to the lap, and the gap at 1 is the difference of two laps, exactly.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from racer.game.rules import TICKS_PER_SECOND, WALL_TOUCH
from racer.game.sim import RacerSim
from racer.game.tracks import TRACKS, load_track, track_name
from racer.game.world import world_of

PLACE = ("x", "y", "heading", "speed", "steer", "throttle", "brake")  # of a car; inputs as it has smoothed them
COLUMNS = ("tick", "time", "arc", "share", *PLACE, "side", "off_road", "wall_contact")
SECTORS = 10
LOSS_WINDOW = 0.01  # share of a lap to either side
BEST_LAPS = Path(__file__).parent / "best-laps"  # the actions of the best laps and rewards known, from the grid


class Lap:
    """What a car did at every tick of a lap, or of what it managed of one: `columns`, by name, each (T + 1,).

    tick, time (s)     from the start of the lap
    arc, share         arc length (units), also as a share of the track's length
    x, y, heading, speed, steer, throttle, brake
    side               distance from the centreline, positive to its left (units)
    off_road, wall_contact                 0 or 1
    """

    def __init__(self, name: str, track_id: str, columns: dict[str, np.ndarray], note: str = ""):
        self.name, self.track_id, self.columns, self.note = name, track_id, columns, note
        length = load_track(track_id).length
        steps = np.diff(columns["arc"])
        steps = steps - length * np.rint(steps / length)  # across the line
        travelled = np.concatenate([[0.0], np.cumsum(steps)])
        # A lap ends within a tick of where it began; a car that turned round or stands has less behind it.
        self.complete = len(steps) > 0 and travelled[-1] > length - 2 * steps.max(initial=0.0) - 1.0
        progress = travelled / (travelled[-1] if self.complete else length)
        self.progress = np.maximum.accumulate(np.clip(progress, 0.0, 1.0))  # never falls

    @classmethod
    def of(cls, name: str, track_id: str, trajectory: np.ndarray, note: str = "") -> Lap:
        """From a car's places (T + 1, 7). The rest of the columns is geometry: nothing is driven again."""
        columns, track = dict(zip(PLACE, np.asarray(trajectory, float).T, strict=True)), load_track(track_id)
        x, y, number = columns["x"], columns["y"], np.zeros(len(trajectory), np.intp)
        world = world_of((track,))
        located = world.locate(number, x, y)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            arc, distance, half_width = world.project(number, x, y, located)
            wall = world.nearest_wall(located[0], x, y)[0]
        (centre_x, centre_y), (along_x, along_y) = track.position(arc).T, track.tangent(arc).T
        left = along_x * (y - centre_y) - along_y * (x - centre_x) >= 0
        tick = np.arange(len(x))
        columns |= {"tick": tick, "time": tick / TICKS_PER_SECOND, "arc": arc, "share": arc / track.length}
        columns |= {"side": np.where(left, distance, -distance)}
        columns |= {"off_road": (distance > half_width).astype(int), "wall_contact": (wall < WALL_TOUCH).astype(int)}
        return cls(name, track_id, {name: columns[name] for name in COLUMNS}, note)

    @property
    def seconds(self) -> float:
        """How long the lap took, or what there is of it."""
        return (len(self.progress) - 1) / TICKS_PER_SECOND

    def time_at(self, share) -> np.ndarray:
        """When the car first reached these shares of the lap (s). NaN where it never came."""
        share = np.asarray(share, float)
        after = np.clip(np.searchsorted(self.progress, share), 1, len(self.progress) - 1)
        low, high = self.progress[after - 1], self.progress[after]
        part = np.clip((share - low) / np.where(high > low, high - low, 1.0), 0.0, 1.0)
        return np.where(share <= self.progress[-1], (after - 1 + part) / TICKS_PER_SECOND, np.nan)

    def lost_to(self, other: Lap) -> np.ndarray:
        """Time lost against another lap around every tick, in ms per unit of the lap; negative where it gains. (T + 1,)"""
        low, high = (
            np.clip(self.progress - LOSS_WINDOW, 0, 1),
            np.clip(self.progress + LOSS_WINDOW, 0, self.progress[-1]),
        )
        lost = (self.time_at(high) - other.time_at(high)) - (self.time_at(low) - other.time_at(low))
        length = (high - low) * load_track(self.track_id).length
        return np.nan_to_num(1000 * lost / np.where(length > 0, length, np.inf))

    @property
    def path_length(self) -> float:
        return float(np.hypot(np.diff(self.columns["x"]), np.diff(self.columns["y"])).sum())

    @property
    def off_road_share(self) -> float:
        return float(self.columns["off_road"][1:].mean())


def save_laps(path: Path, laps: Sequence[Lap]) -> None:
    """Laps as one CSV file, a row a tick: the track, the number of the lap in the file, and COLUMNS."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("track", "lap", *COLUMNS))
        for number, lap in enumerate(laps, start=1):
            for row in zip(*lap.columns.values(), strict=True):
                writer.writerow((lap.track_id, number, *(f"{value:.9g}" for value in row)))


def load_laps(path: Path) -> list[Lap]:
    """The laps of a CSV file of `save_laps`."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in ("track", "lap", *COLUMNS) if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} is not a telemetry file: it has no column {missing[0]!r}")
        rows = list(reader)
    laps, by_number = [], {}
    for row in rows:
        by_number.setdefault(row["lap"], []).append(row)
    try:
        for own in by_number.values():
            columns = {name: np.array([float(row[name]) for row in own]) for name in COLUMNS}
            laps.append(Lap(path.stem, own[0]["track"], columns))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a complete telemetry file: {error}") from error
    return laps


@functools.lru_cache(maxsize=8)
def best_known_lap(track_id: str) -> Lap | None:
    """The fastest lap known that never leaves the road, driven by its recorded actions. None for other tracks than the game's."""
    if track_id not in TRACKS:
        return None
    actions = np.load(BEST_LAPS / f"clean-{track_id}.npz")["actions"].astype(np.float64)
    sim, places, lines = RacerSim(1, [track_id]), [], [0]
    for tick, action in enumerate(actions, start=1):
        lap = sim.lap[0]
        sim.step(action[None], observing=False)
        places.append([getattr(sim, name)[0] for name in PLACE])
        if sim.lap[0] > lap:
            lines.append(tick)
    return Lap.of("best known", track_id, np.array(places[lines[-2] - 1 : lines[-1]]))


class Race:
    """Laps on one track beside the fastest complete one of them, the reference."""

    def __init__(self, laps: Sequence[Lap]):
        self.laps, self.track_id = list(laps), laps[0].track_id
        other = next((lap for lap in laps if track_name(lap.track_id) != track_name(self.track_id)), None)
        if other:
            raise ValueError(f"{other.name} drove on {other.track_id}, not on {self.track_id}")
        self.reference = min(laps, key=lambda lap: (not lap.complete, lap.seconds))
        self.sectors = np.array(
            [np.diff(lap.time_at(np.arange(SECTORS + 1) / SECTORS)) for lap in laps]
        )  # (laps, 10) s

    def gap(self, lap: Lap, share) -> np.ndarray:
        """How far a lap is behind the reference at these shares (s): the sum of what was lost so far."""
        return lap.time_at(share) - self.reference.time_at(share)

    def losses(self) -> list[str]:
        """Where every lap loses most: a sentence each."""
        reference, lines = self.reference, []
        best = self.sectors[self.laps.index(reference)]
        for lap, sectors in zip(self.laps, self.sectors, strict=True):
            if not lap.complete:
                lines.append(f"{lap.name} did not finish a lap: it came to {100 * lap.progress[-1]:.0f} % of it.")
            elif lap is not reference:
                worst = int(np.argmax(sectors - best))
                place = f"from {100 * worst // SECTORS} to {100 * (worst + 1) // SECTORS} % of the lap"
                loss, total = (sectors - best)[worst], lap.seconds - reference.seconds
                lines.append(
                    f"{lap.name} loses most to {reference.name} {place}: {loss:.2f} s of {total:.2f} s in all."
                )
        return lines

    def table(self) -> str:
        """As text. The best time of every sector has a star."""
        wide = max(len(lap.name) for lap in self.laps)
        head = f"{track_name(self.track_id):<{wide}} {'lap s':>8} {'gap':>7} {'path':>7} {'speed':>6} {'off road':>9}  "
        lines = [head + "".join(f"{f'{10 * i}-{10 * i + 10} %':>9}" for i in range(SECTORS))]
        best = np.nanmin(np.where(np.isnan(self.sectors), np.inf, self.sectors), axis=0)
        for lap, sectors in zip(self.laps, self.sectors, strict=True):
            gap = "" if lap is self.reference else f"{lap.seconds - self.reference.seconds:+.3f}"
            text = f"{lap.seconds:8.3f} {gap:>7}" if lap.complete else f"{'no lap':>8} {'':>7}"
            text += f" {lap.path_length:7.0f} {lap.path_length / lap.seconds:6.1f} {100 * lap.off_road_share:7.1f} %  "
            marks = [f"{s:.3f}{'*' if s == b else ' '}" if s == s else "- " for s, b in zip(sectors, best, strict=True)]
            lines.append(f"{lap.name:<{wide}} {text}" + "".join(f"{mark:>9}" for mark in marks))
        return "\n".join([*lines, "", *self.losses()])
