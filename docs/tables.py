"""Writes the tables of README.md and docs/results.md from measured numbers: python docs/tables.py

    python bench_racer.py --only results --json docs/results.json
    python bench_racer.py --only peers --json docs/peers.json

A table stands between <!-- NAME --> and <!-- /NAME -->; tests/test_docs.py holds that it is what this script writes.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bench_racer import PUBLISHED_LAP_SEC, UNSEEN, holds_from  # noqa: E402
from racer.game.limit import limit_seconds  # noqa: E402
from racer.game.tracks import load_track  # noqa: E402
from racer.training.references import BEST_LAP_TICKS, BEST_REWARD  # noqa: E402

PAGES = (HERE.parent / "README.md", HERE / "results.md")


def number(value: float, digits: int = 3) -> str:
    return "never" if math.isinf(value) else f"{value:,.{digits}f}"


def pair(values, worst, digits: int = 3) -> str:
    """Median / worst."""
    return f"{number(median(values), digits)} / {number(worst(values), digits)}"


def row(*cells) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def table(head: tuple, rows: list) -> str:
    return "\n".join([row(*head), row(*["---"] * len(head)), *(row(*cells) for cells in rows)])


def measured() -> tuple[dict, dict]:
    return tuple(json.loads((HERE / f"{name}.json").read_text(encoding="utf-8")) for name in ("results", "peers"))


def track_row(runs: list[dict], place: int = 0) -> list[str]:
    results = [run["results"][place] for run in runs]
    laps = [result["flying_lap_sec"] or math.inf for result in results]
    percents = [percent_of_limit(results[0]["track"], lap) for lap in laps]
    rewards, off_road = ([result[key] for result in results] for key in ("mean_reward", "off_road_share"))
    return [pair(laps, max), pair(percents, min, 1), pair(rewards, min), pair([100 * share for share in off_road], max, 1)]


def percent_of_limit(track: str, lap_sec: float) -> float:
    return 100 * limit_seconds(load_track(track)) / lap_sec


def held(runs: list[dict], which: int, digits: int = 0) -> str:
    return pair([holds_from(run["evaluations"], PUBLISHED_LAP_SEC)[which] for run in runs], max, digits)


def trained_table(results: dict) -> str:
    """The commands of bench_racer.RESULTS that drive on the tracks they train on."""
    rows = []
    for entry in results["results"]:
        if "runs" not in entry or entry["unseen"]:
            continue
        tracks = [result["track"] for result in entry["runs"][0]["results"]]
        for place, track in enumerate(tracks):
            command = f"`{entry['label']}`" if place == 0 else ""
            steps = held(entry["runs"], 0) if len(tracks) == 1 else ""
            seconds = number(median(run["seconds"] for run in entry["runs"]), 0) if place == 0 else ""
            rows.append([command, track, *track_row(entry["runs"], place), steps, seconds])
    return table(
        ("command", "track", "flying lap (s)", "% of the limit", "reward", "off the road (%)", "holds from step", "seconds"),
        rows,
    )


def unseen_table(results: dict) -> str:
    """The commands with --random-tracks, on tracks that the drivers have never seen."""
    rows = []
    for entry in results["results"]:
        if not (found := entry.get("unseen")):
            continue
        above, share, least, failures = (
            [one[name] for one in found] for name in ("better_than_best", "share", "least_share", "failures")
        )
        shares = [pair([100 * value for value in values], min, 1) for values in (share, least)]
        failed = f"{pair(failures, max, 0)} of {found[0]['episodes']}"
        seconds = number(median(run["seconds"] for run in entry["runs"]), 0)
        rows.append([f"`{entry['label']}`", f"{median(above):g} / {min(above)} of {len(UNSEEN)}", *shares, failed, seconds])
    head = ("command", "above the best of 28 settings on", "mean share of its reward (%)", "least share (%)")
    return table((*head, "failures from anywhere", "seconds"), rows)


def drivers_table(results: dict) -> str:
    rows = []
    for entry in (entry for entry in results["results"] if "runs" not in entry):
        percent = percent_of_limit(entry["track"], entry["flying_lap_sec"])
        percent = f"{percent:.1f}{', cutting' if entry['clean_laps'] < entry['laps'] / 2 else ''}"
        values = number(entry["mean_reward"]), number(100 * entry["off_road_share"], 1)
        rows.append([entry["track"], entry["label"], number(entry["flying_lap_sec"]), percent, *values])
    for track, reward in BEST_REWARD.items():
        lap = BEST_LAP_TICKS["clean"][track] / 60
        rows.append([track, "best known", number(lap), f"{percent_of_limit(track, lap):.1f}", number(reward), "0.0"])
    head = ("track", "driver", "flying lap (s)", "% of the limit", "reward", "off the road (%)")
    return table(head, sorted(rows, key=lambda cells: cells[0]))


def peers_table(peers: dict) -> str:
    rows = []
    for entry in peers["peers"]:
        runs, results = entry["runs"], [run["results"][0] for run in entry["runs"]]
        reward = median(r["mean_reward"] for r in results)
        lap = median(r["flying_lap_sec"] or math.inf for r in results)
        held = [holds_from(run["evaluations"], PUBLISHED_LAP_SEC) for run in runs]
        steps, seconds = (median(values) for values in zip(*held, strict=True))
        whole, total = (median(run[key] for run in runs) for key in ("seconds", "steps"))
        label = entry["label"] if "SB3" in entry["label"] else f"`{entry['label']}`"
        numbers = number(total, 0), number(steps, 0), number(seconds, 0), number(reward), number(lap), number(whole, 0)
        rows.append([label, *numbers])
    head = ("trainer", "steps", "holds 7.367 s from step", "from second", "reward", "flying lap (s)", "seconds in all")
    return table(head, rows)


def machine_line(results: dict) -> str:
    machine = results["machine"]
    text = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "numpy", "gymnasium"))
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; {text}."


def front_table(results: dict, peers: dict) -> str:
    """What a stranger needs: the baseline, ours, Stable-Baselines3."""
    entries = {entry["label"]: entry for entry in results["results"] if "runs" in entry}
    best = [entry for entry in results["results"] if entry.get("track") == "track-01" and "runs" not in entry][1]
    rows = [["the game's authors' published driver", number(PUBLISHED_LAP_SEC), "", "", ""]]
    rows.append(["hand-written, best of 28 settings", number(best["flying_lap_sec"]), number(best["mean_reward"]), "", ""])
    for label in (
        "ppo_racer.py",
        "sac_racer.py",
        "ppo_racer.py --slow-game --eval-every 2000",
        "sac_racer.py --slow-game --eval-every 2000",
    ):
        if label in entries:
            runs = entries[label]["runs"]
            lap, _, reward, _ = track_row(runs)
            seconds = number(median(run["seconds"] for run in runs), 0)
            steps = f"{median(run['steps'] for run in runs):,.0f}"
            rows.append([f"`{label.removesuffix(' --eval-every 2000')}`", lap, reward, steps, seconds])
    peers = [entry for entry in peers["peers"] if entry["label"].startswith("SB3 PPO")]
    peer = max(peers, key=lambda entry: median(run["results"][0]["mean_reward"] for run in entry["runs"]))
    lap, _, reward, _ = track_row(peer["runs"])
    whole, total = (median(run[key] for run in peer["runs"]) for key in ("seconds", "steps"))
    label = f"Stable-Baselines3's PPO{peer['label'].removeprefix('SB3 PPO')} (seeds: {len(peer['runs'])})"
    rows.append([label, lap.split(" / ")[0], reward.split(" / ")[0], f"{total:,.0f}", number(whole, 0)])
    rows.append(["best known", number(BEST_LAP_TICKS["clean"]["track-01"] / 60), number(BEST_REWARD["track-01"]), "", ""])
    return table(("track-01", "flying lap (s)", "reward", "steps", "seconds"), rows)


def with_tables(text: str, results: dict, peers: dict) -> str:
    tables = {
        "front": front_table(results, peers),
        "trained": trained_table(results),
        "unseen": unseen_table(results),
        "drivers": drivers_table(results),
    }
    tables |= {"peers": peers_table(peers), "machine": machine_line(results)}
    for name, content in tables.items():
        block = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, block=block: block, text, flags=re.S)
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), *measured()), encoding="utf-8")
