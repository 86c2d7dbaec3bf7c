"""A race as a page: one HTML file that needs no network. Data from here, drawing in race.html beside this file.

Path("race.html").write_text(race_page("my drivers", [Race(laps)]), encoding="utf-8")
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from racer.game.rules import CENTRELINE_RANGE, MAX_SPEED, TICKS_PER_SECOND
from racer.game.track import Track
from racer.game.tracks import load_track, track_name
from racer.view.telemetry import SECTORS, Race

TEMPLATE = Path(__file__).with_name("race.html")
DIGITS = {"x": 2, "y": 2, "heading": 3, "speed": 1, "steer": 2, "throttle": 2, "brake": 2, "side": 2}  # of the columns
SPACING = 5.0  # units between two points of the road's edges


def race_page(title: str, races: Sequence[Race]) -> str:
    """The page: a race per track."""
    data = {"title": title, "ticksPerSecond": TICKS_PER_SECOND, "maxSpeed": MAX_SPEED, "maxSide": CENTRELINE_RANGE}
    data |= {"sectors": SECTORS, "races": [race_data(race) for race in races]}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # a name cannot end the script
    return TEMPLATE.read_text(encoding="utf-8").replace("/* DATA */ null", text)


def race_data(race: Race) -> dict:
    track = load_track(race.track_id)
    drivers = []
    for lap in race.laps:
        columns = {name: rounded(lap.columns[name], digits) for name, digits in DIGITS.items()}
        columns |= {"progress": rounded(lap.progress, 6), "offRoad": lap.columns["off_road"].tolist()}
        about = {"name": lap.name, "note": lap.note, "complete": bool(lap.complete), "path": round(lap.path_length)}
        about |= {"meanSpeed": round(lap.mean_speed, 1), "offRoadShare": round(lap.off_road_share, 4)}
        drivers.append({**about, "colour": race.colour(lap), **columns})
    shape = {"name": track_name(race.track_id), "length": track.length, **outline(track)}
    return {"track": shape, "drivers": drivers, "reference": race.laps.index(race.reference), "losses": race.losses()}


def outline(track: Track) -> dict:
    """The track's lines, each a list of numbers x, y, x, y, ..."""
    s = np.linspace(0, track.length, int(track.length / SPACING))
    centre, normal, left, right = track.road(s)
    lines = {"centre": centre, "left": centre + left[:, None] * normal, "right": centre - right[:, None] * normal}
    lines |= {"outer": track.outer, "inner": track.inner}
    return {name: rounded(line.ravel(), 1) for name, line in lines.items()}


def rounded(values: np.ndarray, digits: int) -> list[float]:
    """Short numbers: 1.0 as 1."""
    return [int(value) if value == int(value) else value for value in np.round(values, digits).tolist()]
