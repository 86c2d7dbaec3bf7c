"""How drivers do on tracks that nobody trained on: twenty of each of four kinds.

    python docs/unseen.py drivers/every-track.pt                                   # a table
    python docs/unseen.py runs/a runs/b --json docs/results/unseen.json            # of several drivers: median / worst of them

Laps count in % of the limit whether they are clean or not; next to them stands how much of the time a driver is off the road.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from racer import load_driver
from racer.training.evaluation import evaluate, summarize, with_flying_laps
from racer.training.references import hand_written_settings
from racer_env import RacerVectorEnv

RESULTS = Path(__file__).parent / "results" / "unseen.json"
KINDS = {"as the game's": "", "twice as wide": "-wide", "twice as long": "-long", "both": "-long-wide"}
NUMBERS = range(10_001, 10_021)
NAMES = ("track", "flying_lap_sec", "percent_of_limit", "cutting", "off_road_share", "mean_reward", "percent_of_hand_written")
ROWS = {  # of a driver's results on the tracks of a kind
    "limit, median track (%)": lambda tracks: np.median([track["percent_of_limit"] or 0 for track in tracks]),
    "worst track (%)": lambda tracks: min(track["percent_of_limit"] or 0 for track in tracks),
    "off the road, mean (%)": lambda tracks: -100 * np.mean([track["off_road_share"] for track in tracks]),
    "worst track off the road (%)": lambda tracks: -100 * max(track["off_road_share"] for track in tracks),
    "reward, % of the best hand-written, mean": lambda tracks: np.mean([t["percent_of_hand_written"] or 0 for t in tracks]),
    "least": lambda tracks: min(track["percent_of_hand_written"] or 0 for track in tracks),
    "tracks above 100 %": lambda tracks: sum((track["percent_of_hand_written"] or 0) > 100 for track in tracks),
}
FAILURES = "failed episodes of 200 from anywhere"


def measure(drivers: list[Path]) -> dict:
    """By kind: for every driver its results on each track, and its failures from anywhere."""
    found = {}
    for kind, suffix in KINDS.items():
        tracks, found[kind] = [f"random-{number}{suffix}" for number in NUMBERS], []
        envs, anywhere = RacerVectorEnv(20, tracks), RacerVectorEnv(200, tracks, start="anywhere")
        hand_written = [settings[0] for settings in hand_written_settings(tracks).values()]
        for path in drivers:
            driver = load_driver(path)
            episodes = evaluate(driver, envs, tracks)
            results = [summarize([e], envs.config, best) for e, best in zip(episodes, hand_written, strict=True)]
            results = with_flying_laps(results, driver, tracks, envs.config)
            rounded = [{k: round(r[k], 4) if isinstance(r[k], float) else r[k] for k in NAMES} for r in results]
            failures = sum(episode.failed for episode in evaluate(driver, anywhere, tracks, seed=1))
            found[kind].append({"driver": path.name, "tracks": rounded, "failures": failures})
            print(kind, path, file=sys.stderr)
    return found


def table(found: dict) -> str:
    """Median and worst over the drivers; of one driver, its value."""
    lines = [f"| | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    for name, value in {**ROWS, FAILURES: None}.items():
        cells = []
        for drivers in found.values():
            values = [value(d["tracks"]) if value else -d["failures"] for d in drivers]  # more is better
            pair = (np.median(values), min(values)) if len(values) > 1 else values
            digits = 0 if name.startswith("tracks") or not value else 1
            cells.append(" / ".join(f"{abs(number):.{digits}f}" for number in pair))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drivers", nargs="*", type=Path, help="run folders or checkpoints; none: show the recorded results")
    parser.add_argument(
        "--json", type=Path, help="file to write all results to, or to show (default: docs/results/unseen.json)"
    )
    args = parser.parse_args()
    results = measure(args.drivers) if args.drivers else json.loads((args.json or RESULTS).read_text())["kinds"]
    if args.json and args.drivers:
        args.json.write_text(json.dumps({"drivers": [str(driver) for driver in args.drivers], "kinds": results}))
    print(table(results))
