"""Race drivers against each other: a table in the terminal, and a page to look at (race.html).

    python -m racer.compare runs/a runs/b
    python -m racer.compare runs/a best hand-written --track-id track-03 --out race.html

A driver is a run folder or a checkpoint of either algorithm, `best` (the best lap known, on the game's tracks), `hand-written`
(full throttle and a steering rule, at its best setting) or a telemetry CSV (its fastest lap on the track). Each drives a flying lap
on the embedded engine. Gaps are to the fastest of them.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro

from callbacks_lite import MANY_TRACKS
from racer.game.tracks import load_track, track_name
from racer.training.drivers import TrainedDriver, load_driver
from racer.training.evaluation import drive_lap, hand_written_lap, hand_written_settings
from racer.view.page import race_page
from racer.view.telemetry import Lap, Race, best_known_lap, load_laps


@dataclasses.dataclass
class Args:
    drivers: tyro.conf.Positional[tuple[str, ...]]
    """run folders, checkpoints, telemetry files, best, hand-written"""
    track_id: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: the first driver's)")] = ()
    """tracks to race on: names, random-1 and so on, or JSON files"""
    out: Path = Path("race.html")
    """file for the page"""
    png: Path | None = None
    """write a picture to this file instead of the page"""
    gif: Path | None = None
    """write an animation to this file instead of the page"""


def source_of(word: str) -> TrainedDriver | list[Lap] | str:
    """What a word of the command line means."""
    if word in ("best", "hand-written"):
        return word
    return load_laps(Path(word)) if word.lower().endswith(".csv") else load_driver(word)


def tracks_of(sources: list) -> tuple[str, ...]:
    """The tracks of the first driver that has some."""
    for source in sources:
        if isinstance(source, TrainedDriver):
            return source.args.tracks[:MANY_TRACKS]
        if isinstance(source, list) and source:
            return tuple(dict.fromkeys(lap.track_id for lap in source))[:MANY_TRACKS]
    return ("track-01",)


def lap_on(track: str, name: str, source) -> Lap:
    """ValueError if there is no such lap."""
    if source == "best":
        lap = best_known_lap(track)
        if lap is None:
            raise ValueError(f"no best lap is known on {track_name(track)}; leave `best` out")
        return lap
    if source == "hand-written":
        return hand_written_lap(track, *hand_written_settings([track])[track][1:])
    if isinstance(source, TrainedDriver):
        lap = drive_lap(name, source, track)
        lap.note = f"step {source.steps:,}" + (f", {lap.note}" if lap.note else "")
        return lap
    laps = [lap for lap in source if track_name(lap.track_id) == track_name(track)]
    if not laps:
        other = ", ".join(sorted({track_name(lap.track_id) for lap in source})) or "no track"
        raise ValueError(f"{name} has laps on {other}, none on {track_name(track)}")
    fastest = min(laps, key=lambda lap: (not lap.complete, lap.seconds))
    return Lap(name, track, fastest.columns)


def names_of(words: tuple[str, ...]) -> list[str]:
    """Short names, as far as they differ."""
    short = [Path(w).parent.name if Path(w).name in ("best.pt", "checkpoint.pt") else Path(w).stem for w in words]
    return [name if name and short.count(name) == 1 else word for name, word in zip(short, words, strict=True)]


def run_races(words: tuple[str, ...], tracks: tuple[str, ...] = ()) -> list[Race]:
    """A race on every track, shown as a table."""
    if not words:
        raise ValueError("no drivers; give run folders, checkpoints, telemetry files, `best` or `hand-written`")
    sources = [source_of(word) for word in words]
    tracks = tracks or tracks_of(sources)
    for track in tracks:
        load_track(track)  # a wrong name is refused before anybody drives
    races = []
    for track in tracks:
        races.append(Race([lap_on(track, *named) for named in zip(names_of(words), sources, strict=True)]))
        print(f"{races[-1].table()}\n", flush=True)
    return races


def main(args: Args) -> int:
    races = run_races(args.drivers, args.track_id)
    if args.png or args.gif:
        from racer.view.pictures import draw_laps, save_picture

        first, others = races[0].reference, [lap for lap in races[0].laps if lap is not races[0].reference]
        laps = [
            *others[:1],
            first,
            *others[1:],
        ]  # the first one that is not the fastest, coloured by what it loses to that
        if args.png:
            save_picture(args.png, draw_laps(laps))
        if args.gif:
            args.gif.write_bytes(draw_laps(laps, replay=True))
    else:
        args.out.write_text(race_page(" · ".join(names_of(args.drivers)), races), encoding="utf-8")
    print("wrote", " and ".join(str(file) for file in (args.png, args.gif) if file) or args.out)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except (ValueError, OSError) as error:
        print(f"racer.compare: {error}", file=sys.stderr)
        sys.exit(2)
