"""Race drivers against each other: a table in the terminal, and a page to look at (race.html).

    python -m racer.compare runs/a runs/b
    python -m racer.compare runs/a best limit hand-written --track-id track-03 --out race.html

A driver is a run folder or a checkpoint of either algorithm, `best` (the best lap known, on the game's tracks), `limit` (the
shortest line on the road at full speed, on every track), `hand-written` (full throttle and a steering rule, at its best setting)
or a telemetry CSV. Each shows its fastest lap of an episode from the grid on the embedded engine. Gaps are to the fastest clean
lap, or to the limit.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Annotated

import tyro

from callbacks_lite import MANY_TRACKS
from racer.game.checks import UserError, writing
from racer.game.tracks import load_track, track_name
from racer.training.checkpoints import TrainedDriver, load_driver
from racer.training.evaluation import drive_lap
from racer.training.references import best_known_lap, full_throttle, hand_written_settings, limit_lap
from racer.training.settings import as_command, run_as_script
from racer.training.terminal import print_safely
from racer.view.page import race_page
from racer.view.telemetry import COLOURS, LapTrace, Race, load_laps

REFERENCES = ("best", "limit", "hand-written")


@dataclasses.dataclass
class Args:
    drivers: tyro.conf.Positional[tuple[str, ...]]
    """run folders, checkpoints, telemetry files, best, limit, hand-written"""
    track_id: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: the first driver's)")] = ()
    """tracks to race on: names, random-1 and so on, or JSON files"""
    out: Path = Path("race.html")
    """file for the page"""
    png: Path | None = None
    """write a picture to this file instead of the page; of several tracks, a file for each"""
    gif: Path | None = None
    """write an animation to this file instead of the page; of several tracks, a file for each"""
    trainer: tuple[Path, ...] = ()
    """files that trained some of the checkpoints, as far as that is not ppo_racer.py or sac_racer.py; they are imported"""


def source_of(word: str, trainer: tuple[Path, ...] = ()) -> TrainedDriver | list[LapTrace] | str:
    """What a word of the command line means."""
    if word in REFERENCES:
        return word
    return load_laps(Path(word)) if word.lower().endswith(".csv") else load_driver(word, trainer)


def tracks_of(sources: list) -> tuple[str, ...]:
    """The tracks of the first driver that has some."""
    for source in sources:
        if isinstance(source, TrainedDriver):
            return source.args.tracks[:MANY_TRACKS]
        if isinstance(source, list) and source:
            return tuple(dict.fromkeys(lap.track_id for lap in source))[:MANY_TRACKS]
    return ("track-01",)


def lap_on(track: str, name: str, source) -> LapTrace:
    """UserError if there is no such lap."""
    if source == "best":
        lap = best_known_lap(track)
        if lap is None:
            raise UserError(f"no best lap is known on {track_name(track)}; take `limit` instead")
        return lap
    if source == "limit":
        return limit_lap(track)
    if source == "hand-written":
        _, gain, offset = hand_written_settings([track])[track]
        lap = drive_lap(name, functools.partial(full_throttle, gain=gain, offset=offset), track)
        lap.note = "best of 28 settings"
        return lap
    if isinstance(source, TrainedDriver):
        lap = drive_lap(name, source, track)
        lap.note = f"step {source.steps:,}" + (f", {lap.note}" if lap.note else "")
        return lap
    laps = [lap for lap in source if track_name(lap.track_id) == track_name(track)]
    if not laps:
        other = ", ".join(sorted({track_name(lap.track_id) for lap in source})) or "no track"
        raise UserError(f"{name} has laps on {other}, none on {track_name(track)}")
    fastest = min(laps, key=lambda lap: (not lap.complete, lap.seconds))
    return LapTrace(name, track, fastest.columns)


def names_of(words: tuple[str, ...]) -> list[str]:
    """Short names, as far as they differ."""
    paths = [Path(word) for word in words]
    short = [path.parent.name if path.name in ("best.pt", "checkpoint.pt") else path.name for path in paths]
    short = [name.removesuffix(".csv").removesuffix(".pt") for name in short]
    own = [word in REFERENCES or name not in (*COLOURS, *REFERENCES) for name, word in zip(short, words, strict=True)]
    return [n if n and k and short.count(n) == 1 else word for n, k, word in zip(short, own, words, strict=True)]


def run_races(words: tuple[str, ...], tracks: tuple[str, ...] = (), trainer: tuple[Path, ...] = ()) -> list[Race]:
    """A race on every track, shown as a table."""
    if not words:
        raise UserError("no drivers; give run folders, checkpoints, telemetry files, `best`, `limit` or `hand-written`")
    sources = [source_of(word, trainer) for word in words]
    tracks = tracks or tracks_of(sources)
    for track in tracks:
        load_track(track)  # a wrong name is refused before anybody drives
    races = []
    for track in tracks:
        races.append(Race([lap_on(track, *named) for named in zip(names_of(words), sources, strict=True)]))
        print_safely(f"{races[-1].table()}\n")
    return races


def run_comparison(args: Args) -> None:
    races = run_races(args.drivers, args.track_id, args.trainer)
    wanted, written = [file for file in (args.png, args.gif) if file], []
    for file in wanted:
        from racer.view.pictures import draw_laps, save_picture

        for race in races:
            # The first one that is not the fastest, coloured by what it loses to that.
            others = [lap for lap in race.laps if lap is not race.reference]
            drawn = draw_laps([*others[:1], race.reference, *others[1:]], replay=file == args.gif)
            path = file.with_stem(f"{file.stem}-{track_name(race.track_id)}") if len(races) > 1 else file
            with writing(path):
                path.write_bytes(drawn) if file == args.gif else save_picture(path, drawn)
            written.append(path)
    if not wanted:
        with writing(args.out):
            args.out.write_text(race_page(" · ".join(names_of(args.drivers)), races), encoding="utf-8")
        written = [args.out]
    print_safely(f"wrote {', '.join(map(str, written))}")


@as_command
def main():
    run_comparison(tyro.cli(Args, prog="python -m racer.compare", description=__doc__))


if __name__ == "__main__":
    run_as_script(main)
