"""Laps as columns, and what they say beside each other: where was the time lost?

    lap = LapTrace.of("mine", "track-01", trajectory)        # places (T + 1, 7), one a tick: PLACE in racer/game/episodes.py
    save_laps(Path("lap.csv"), [lap])
    race = Race([lap, best_known_lap("track-01")])
    print(race.table())

Shares run from 0, where a lap begins, to 1, where it ends: the tick after the line and the one after the next line. So sector
times add up to the lap, and the gap at 1 is the difference of two laps, exactly.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from racer.game.checks import UserError
from racer.game.episodes import PLACE
from racer.game.rules import TICKS_PER_SECOND, WALL_TOUCH
from racer.game.track import squared_to_segments, wall_segments
from racer.game.tracks import load_track, track_name

COLUMNS = ("tick", "time", "arc", "share", *PLACE, "side", "off_road", "wall_contact")
SECTORS = 10
LOSS_WINDOW = 0.01  # share of a lap to either side
COLOURS = {"this run": 0, "best known": 1, "limit": 2, "hand-written": 3, "first evaluation": 4, "latest evaluation": 5}
BEST_LAPS = Path(__file__).parent / "best-laps"  # the actions of the best laps and rewards known, from the grid


class LapTrace:
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
    def of(cls, name: str, track_id: str, trajectory: np.ndarray, note: str = "") -> LapTrace:
        """From a car's places (T + 1, 7). The rest of the columns is geometry: nothing is driven again."""
        columns, track = dict(zip(PLACE, np.asarray(trajectory, float).T, strict=True)), load_track(track_id)
        x, y = columns["x"], columns["y"]
        places = np.stack([x, y], axis=1)
        arc, distance = track.project(places)
        wall = np.sqrt(squared_to_segments(places, *wall_segments(track)).min(1))
        (centre_x, centre_y), (along_x, along_y) = track.position(arc).T, track.tangent(arc).T
        left = along_x * (y - centre_y) - along_y * (x - centre_x) >= 0
        tick = np.arange(len(x))
        columns |= {"tick": tick, "time": tick / TICKS_PER_SECOND, "arc": arc, "share": arc / track.length}
        columns |= {"side": np.where(left, distance, -distance)}
        columns |= {"off_road": (distance > track.half_width(arc)).astype(int), "wall_contact": (wall < WALL_TOUCH).astype(int)}
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

    def lost_to(self, other: LapTrace) -> np.ndarray:
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
    def mean_speed(self) -> float:
        return float(self.columns["speed"][1:].mean())

    @property
    def off_road_share(self) -> float:
        return float(self.columns["off_road"][1:].mean())


def save_laps(path: Path, laps: Sequence[LapTrace]) -> None:
    """Laps as one CSV file, a row a tick: the track, the number of the lap in the file, and COLUMNS."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("track", "lap", *COLUMNS))
        for number, lap in enumerate(laps, start=1):
            for row in zip(*lap.columns.values(), strict=True):
                writer.writerow((lap.track_id, number, *(f"{value:.9g}" for value in row)))


def load_laps(path: Path) -> list[LapTrace]:
    """The laps of a CSV file of `save_laps`; those on tracks that are not there any more are left out, if there are others."""
    laps, by_number, problem = [], {}, None
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in ("track", "lap", *COLUMNS) if name not in (reader.fieldnames or ())]
            if missing:
                raise UserError(f"{path} is not a telemetry file: it has no column {missing[0]!r}")
            for row in reader:
                by_number.setdefault(row["lap"], []).append(row)
        for own in by_number.values():
            columns = {name: np.array([float(row[name]) for row in own]) for name in COLUMNS}
            if len(own) < 2 or not all(np.isfinite(column).all() for column in columns.values()):
                raise ValueError(f"lap {own[0]['lap']} has {len(own)} rows, or values that are not finite")
            try:
                laps.append(LapTrace(path.stem, own[0]["track"], columns))
            except UserError as error:
                problem = error
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (TypeError, ValueError, csv.Error) as error:
        raise UserError(f"{path} is not a complete telemetry file: {error}") from error
    if problem and not laps:
        raise problem
    return laps


class Race:
    """Laps on one track beside the reference: the limit, or the fastest of the clean ones, or else the fastest."""

    def __init__(self, laps: Sequence[LapTrace]):
        self.laps, self.track_id = list(laps), laps[0].track_id
        other = next((lap for lap in laps if track_name(lap.track_id) != track_name(self.track_id)), None)
        if other:
            raise UserError(f"{other.name} drove on {other.track_id}, not on {self.track_id}")
        order = [(lap.name != "limit", not lap.complete, lap.off_road_share > 0, lap.seconds) for lap in laps]
        self.reference = laps[order.index(min(order))]
        self.sectors = np.array([np.diff(lap.time_at(np.arange(SECTORS + 1) / SECTORS)) for lap in laps])  # (laps, 10) s

    def gap(self, lap: LapTrace, share) -> np.ndarray:
        """How far a lap is behind the reference at these shares (s): the sum of what was lost so far."""
        return lap.time_at(share) - self.reference.time_at(share)

    def colour(self, lap: LapTrace) -> int:
        """The number of a driver's colour: its own in every race, if it has one; else the next that nobody else has here."""
        if lap.name in COLOURS:
            return COLOURS[lap.name]
        taken = [COLOURS[other.name] for other in self.laps if other.name in COLOURS]
        # Those of references come last, so that nobody is taken for one.
        free = [colour for colour in (0, 4, 5, 1, 3, 2) if colour not in taken] or [0]
        return free[[other for other in self.laps if other.name not in COLOURS].index(lap) % len(free)]

    def losses(self) -> list[str]:
        """Where every lap loses most: a sentence each."""
        reference, lines = self.reference, []
        best = self.sectors[self.laps.index(reference)]
        for lap, sectors in zip(self.laps, self.sectors, strict=True):
            if not lap.complete:
                lines.append(f"{lap.name} did not finish a lap: it came to {100 * lap.progress[-1]:.0f} % of it.")
            elif lap is not reference and reference.complete:
                worst = int(np.argmax(sectors - best))
                place = f"from {100 * worst // SECTORS} to {100 * (worst + 1) // SECTORS} % of the lap"
                loss, total = (sectors - best)[worst], lap.seconds - reference.seconds
                how = f"{abs(total):.3f} s {'slower' if total > 0 else 'faster'} than" if total else "as fast as"
                most = f"; it loses most {place}: {loss:.3f} s" if total > 0 and loss >= 0.0005 else ""
                cutting = f", off the road {100 * lap.off_road_share:.1f} %" if lap.off_road_share else ""
                lines.append(f"{lap.name} is {how} {reference.name}{cutting}{most}.")
        return lines

    def table(self) -> str:
        """As text. The best time of every sector has a star."""
        wide = max(len(lap.name) for lap in self.laps)
        wide = max(wide, len(track_name(self.track_id)))
        lines = [f"{track_name(self.track_id):<{wide}} {'fastest lap':>11} {'gap':>7} {'path':>7} {'speed':>6} {'off road':>9}"]
        clean = [lap.off_road_share == 0 for lap in self.laps]  # a lap that cuts is not the better one
        best = np.where(np.isnan(self.sectors), np.inf, self.sectors)[clean if any(clean) else slice(None)].min(0)
        for lap in self.laps:
            gap = "" if lap is self.reference or not self.reference.complete else f"{lap.seconds - self.reference.seconds:+.3f}"
            text = f"{lap.seconds:9.3f} s {gap:>7}" if lap.complete else f"{'no lap':>11} {'':>7}"
            text += f" {lap.path_length:7.0f} {lap.mean_speed:6.1f} {100 * lap.off_road_share:7.1f} %"
            lines.append(f"{lap.name:<{wide}} {text}")
        lines += ["", f"{'sectors, %':<{wide}} " + "".join(f"{f'{10 * i}-{10 * i + 10}':>8}" for i in range(SECTORS))]
        for lap, sectors in zip(self.laps, self.sectors, strict=True):
            marks = [f"{s:.3f}{'*' if s == b else ' '}" if s == s else "- " for s, b in zip(sectors, best, strict=True)]
            lines.append(f"{lap.name:<{wide}} " + "".join(f"{mark:>8}" for mark in marks))
        return "\n".join([*lines, "", *self.losses()])
