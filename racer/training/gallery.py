"""What a run leaves to look at: the best lap of every track, as a picture, an animation, columns, and a race against others.

racing_line.png, replay.gif, lap-TRACK.csv, race.html; of several tracks, racing_line-TRACK.png and so on
"""

from __future__ import annotations

import warnings

from racer.game.tracks import track_name
from racer.training.evaluation import hand_written_lap
from racer.view.page import race_page
from racer.view.telemetry import Lap, Race, best_known_lap, save_laps


def draw_best(run, finished: bool = False) -> None:
    """The racing lines of the best driver so far; of a finished run also the rest. Errors only warn."""
    try:
        with run.clock("pictures"):
            from racer.view.pictures import draw_laps, save_picture

            races = [laps_to_race(run, lap) for lap in run.best["laps"]]
            for laps in races:
                name = track_name(laps[0].track_id)
                tag, suffix = ("", "") if len(run.args.tracks) == 1 else (f"{name}/", f"-{name}")
                picture = draw_laps(laps[:2], replay=finished)
                if finished:
                    run.logger.animation(f"eval/{tag}replay", picture, run.steps)
                    (run.folder / f"replay{suffix}.gif").write_bytes(picture)
                    save_laps(run.folder / f"lap-{name}.csv", laps[:1])
                else:
                    run.logger.image(f"eval/{tag}racing_line", picture, run.steps)
                    save_picture(run.folder / f"racing_line{suffix}.png", picture)
            if finished and races:
                page = race_page(run.folder.name, [Race(laps) for laps in races])
                (run.folder / "race.html").write_text(page, encoding="utf-8")
    except Exception as error:  # no Pillow, a full disk
        warnings.warn(f"no picture of the best lap ({error!r}); training continues", stacklevel=2)


def laps_to_race(run, lap: dict) -> list[Lap]:
    """The best lap of a run, the best one known, the hand-written driver's, and the run's own first one, as far as there are."""
    track, best, first = lap["track_id"], run.best["step"], run.first_laps.get(lap["track_id"])
    laps = [Lap.of("this run", **lap, note=f"step {best:,}"), best_known_lap(track)]
    if track in run.hand_written:
        _, gain, offset = run.hand_written[track]
        laps.append(hand_written_lap(track, gain, offset))
    if first and first["step"] < best:
        laps.append(Lap.of("its first lap", track, first["trajectory"], f"step {first['step']:,}"))
    return [lap for lap in laps if lap is not None]
