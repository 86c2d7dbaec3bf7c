"""Evaluate a trained driver: deterministic laps, lap times, rewards, and what they compare with.

    python -m racer.evaluate runs/NAME
    python -m racer.evaluate runs/NAME --start anywhere --episodes 200
    python -m racer.evaluate drivers/every-track.pt --track-id track-01 mine.json --json results.json
    python -m racer.evaluate runs/NAME --game ../top-down-racer-02

It drives on the tracks of the training unless others are given. From the grid all episodes are the same, so there is one per
track; in the real game, and from anywhere, there are --episodes of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import tyro

from racer.game.checks import UserError, writing
from racer.game.rewards import REWARD_TERMS
from racer.game.tracks import check_game_tracks
from racer.training.checkpoints import load_driver
from racer.training.evaluation import describe_more, evaluate, lines_of, summarize, with_flying_laps
from racer.training.references import hand_written_settings
from racer.training.settings import as_command, run_as_script
from racer.training.terminal import print_safely
from racer.view.telemetry import save_laps
from racer_env import RacerVectorEnv


@dataclasses.dataclass
class Args:
    checkpoint: tyro.conf.Positional[Path]
    """run folder (its best.pt) or checkpoint, of either algorithm"""
    track_id: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: those of the training)")] = ()
    """tracks to drive on: names, random-1 and so on, or JSON files"""
    start: Literal["grid", "anywhere"] = "grid"
    """where episodes start"""
    episodes: int = 10
    """episodes per track, where they differ: from anywhere, and in the real game"""
    seed: int = 1
    """random seed of the starts from anywhere"""
    config_path: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(default: that of the training)")] = None
    """JSON file with reward weights and episode limits"""
    json: Path | None = None
    """also write the results to this file"""
    telemetry: Path | None = None
    """also write every lap, tick by tick, to this CSV file"""
    bridge_url: tuple[str, ...] = ()
    """drive in the real game behind these URLs"""
    game: Path | None = None
    """drive in the real game in this folder; its bridges are started and stopped automatically"""
    bridges: int = 1
    """with --game: number of bridges to start"""
    trainer: Path | None = None
    """the file that trained the driver, if that is not ppo_racer.py or sac_racer.py; it is imported"""


def check_args(args: Args) -> None:
    """UserError for flags that cannot work, before anything is started."""
    for flag, value, most in (("--episodes", args.episodes, 100_000), ("--bridges", args.bridges, 256)):
        if not 1 <= value <= most:
            raise UserError(f"{flag} is {value}; it must be from 1 to {most}")
    if args.game and args.bridge_url:
        raise UserError("--game and --bridge-url are mutually exclusive")
    if args.telemetry and (args.game or args.bridge_url):
        raise UserError("--telemetry needs the embedded engine, since the real game does not say where its cars are")
    for file in (args.json, args.telemetry):
        if file:
            with writing(file):
                file.open("a").close()  # fail now, not after the drive


def run_evaluation(args: Args) -> list[dict]:
    """-> a summary per track (evaluation.py), which is also printed"""
    driver = load_driver(args.checkpoint, args.trainer)
    check_args(args)
    if missing := set(driver.reward_terms) - set(REWARD_TERMS):
        print_safely(f"trained with the reward terms {', '.join(sorted(missing))}, which are not in these rewards")
    tracks, config = args.track_id or driver.args.tracks, args.config_path or driver.config
    in_game = bool(args.game or args.bridge_url)
    if in_game:
        check_game_tracks(tracks)
    references, count = {}, args.episodes
    if args.start == "grid" and not in_game:  # deterministic: one episode is like the other, and like that of the training
        references, count = hand_written_settings(tracks, config), 1
    each = "1 episode" if count == 1 else f"{count} episodes"
    where = "" if len(tracks) == 1 else f" on each of {len(tracks)} tracks"
    print_safely(f"{each}{where}, from {'the grid' if args.start == 'grid' else 'anywhere'}")
    settings = {"start": args.start, "retries": 10 if args.game else 0, "render_mode": "rgb_array" if args.telemetry else None}
    with contextlib.ExitStack() as stack:
        urls = args.bridge_url
        if args.game:
            from racer.game.launcher import end_bridges, start_bridges

            stack.callback(end_bridges)
            urls = start_bridges(args.game, args.bridges)
        envs = RacerVectorEnv(count * len(tracks), tracks, config, list(urls) or None, **settings)
        stack.callback(envs.close)
        episodes = evaluate(driver.agent.drive, envs, tracks, args.seed)
    results = [
        summarize(episodes[i :: len(tracks)], envs.config, references.get(track, [None])[0]) for i, track in enumerate(tracks)
    ]
    if args.start == "grid" and not in_game:
        results = with_flying_laps(results, driver, tracks, envs.config)
    for line in [*lines_of(results), *describe_more(results)]:
        print_safely(line)
    if args.telemetry:
        with writing(args.telemetry):
            save_laps(args.telemetry, [lap for episode in episodes for lap in episode.lap_traces()])
    if args.json:
        with writing(args.json):
            args.json.write_text(json.dumps(results, indent=2), encoding="utf-8")
    return results


@as_command
def main():
    run_evaluation(tyro.cli(Args, prog="python -m racer.evaluate", description=__doc__))


if __name__ == "__main__":
    run_as_script(main)
