"""The documents: their links, commands, flags and Python blocks work, and their tables are what was measured."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import MODULES, ROOT, promised_tags

import bench_racer
from racer import compare, evaluate, experiment, export

PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "drivers" / "README.md", *(ROOT / "docs").glob("*.md")])
TEXT = {page.name if page.parent.name != "drivers" else "drivers": page.read_text(encoding="utf-8") for page in PAGES}
BLOCKS = [(name, code) for name, text in TEXT.items() for code in re.findall(r"```python\n(.*?)```", text, re.S)]
COMMANDS = [
    (name, line)
    for name, text in TEXT.items()
    for block in re.findall(r"```\n(.*?)```", text, re.S)
    for line in block.splitlines()
    if re.search(r"\b(python|torchrun)\b", line)
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.name}")
def test_links_lead_to_files_and_their_sections(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        file, _, section = target.partition("#")
        assert (page.parent / file).exists(), target
        if section:
            titles = re.findall(r"^#+ (.*)$", (page.parent / file).read_text(encoding="utf-8"), re.M)
            assert section in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], target


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_commands_name_programs_and_flags_that_exist(page, line):
    line = re.sub(r'"[^"]*"', "", line.split("  #")[0])
    for file in re.findall(r"python ((?:\w+/)?\w+\.py)", line):
        assert (ROOT / file).exists(), file
    known = {"ppo_racer": MODULES["ppo"].Args, "sac_racer": MODULES["sac"].Args}
    known |= {"bench_racer": bench_racer.Args, "racer.compare": compare.Args}
    known |= {"racer.evaluate": evaluate.Args, "racer.export": export.Args, "racer.experiment": experiment.Args}
    for program, settings in known.items():
        if re.search(rf"\b{re.escape(program)}(\.py)?\b", line):
            names = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(settings)} | {"--slow-game"}
            given = re.findall(r"(--[a-z][\w-]*)", line[line.index(program) :])
            assert set(given) <= names, set(given) - names


@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(BLOCKS)])
def test_python_blocks_run(page, code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_example_of_a_track_can_be_driven(tmp_path):
    from racer_env import RacerEnv

    (example,) = re.findall(r"```json\n(.*?)```", TEXT["environment.md"], re.S)
    (tmp_path / "mine.json").write_text(example)
    env = RacerEnv(str(tmp_path / "mine.json"))
    env.reset(seed=0)
    assert json.loads(example)["name"] == "mine" and env.step([0.0, 1.0, 0.0])[4]["lap"] == 1


@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_every_promised_tag_is_explained(name):
    text = TEXT["ppo.md"] + (TEXT["sac.md"] if name == "sac" else "")
    named = {tag for cell in re.findall(r"^\| (`.*?) \|", text, re.M) for tag in re.findall(r"`([^`]+)`", cell)}
    short = {tag.replace("/track-01", "") for tag in promised_tags(name)}
    missing = [tag for tag in short if tag not in named and not tag.startswith("reward/") and "lap_time_sec" not in tag]
    assert not missing, missing


@pytest.mark.parametrize(("name", "folder"), [("trained", "results"), ("peers", "peers")])
def test_the_tables_are_what_was_measured(name, folder):
    found = json.loads((ROOT / "docs" / folder / "experiment.json").read_text())
    (shown,) = re.findall(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", TEXT["results.md"], re.S)
    assert shown == experiment.show_table(experiment.table(found), markdown=True)


def test_the_front_page_shows_the_same_numbers():
    files = [ROOT / "docs" / folder / "experiment.json" for folder in ("results", "peers")]
    rows = [row for file in files for row in experiment.table(json.loads(file.read_text()))]
    by_command = {row[0].replace(" --eval-every 4000", ""): row for row in reversed(rows)}
    lines = re.findall(r"^\| `(\w+_racer\.py[^`]*)` \| (\S+ / \S+) \| (\S+ / \S+) \|", TEXT["README.md"], re.M)
    assert len(lines) == 4 and all((lap, reward) == (by_command[c][3], by_command[c][5]) for c, lap, reward in lines)
    lap, reward = by_command["sb3 ppo authors"][3], by_command["sb3 ppo authors"][5]
    assert f"settings of the game's authors | {lap} | {reward} |" in TEXT["README.md"]


def test_ppo_and_sac_are_compared_by_the_best_reward_so_far_of_the_same_runs():
    """At some steps, and 4 % more, since evaluations of the two are not at the same ones."""
    commands = json.loads((ROOT / "docs" / "results" / "experiment.json").read_text())["commands"]
    runs = {c["command"][:3]: [run["evaluations"] for run in c["runs"]] for c in commands if "--slow-game" in c["command"]}

    def reward_at(algorithm: str, steps: int) -> str:
        best = [max(reward for step, _, reward, _ in run if step <= 1.04 * steps) for run in runs[algorithm]]
        return f"{np.median(best):.2f}"

    both = {steps: (reward_at("sac", steps), reward_at("ppo", steps)) for steps in (12_000, 20_000, 40_000, 60_000)}
    for sac, ppo in (both[12_000], both[40_000]):
        assert re.search(rf"{sac}\D+{ppo}", TEXT["README.md"])
    for sac, ppo in both.values():
        assert re.search(rf"{sac}\D+{ppo}", TEXT["sac.md"])


def test_the_table_of_unseen_tracks_is_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    unseen = importlib.import_module("unseen")
    found = json.loads((ROOT / "docs" / "results" / "unseen.json").read_text())
    shipped = {kind: drivers[:1] for kind, drivers in found["kinds"].items()}  # the first one is that in drivers/
    for page, results in (("results.md", found["kinds"]), ("drivers", shipped)):
        (shown,) = re.findall(r"<!-- unseen -->\n(.*?)\n<!-- /unseen -->", TEXT[page], re.S)
        assert shown == unseen.table(results)
    assert all(len(drivers) == len(found["drivers"]) >= 3 for drivers in found["kinds"].values())


def test_the_front_page_is_short_and_says_what_the_tests_are_run_with():
    lines = TEXT["README.md"].splitlines()
    tables_only = [line for line in lines if not line.startswith("|")]
    assert len(lines) <= 110 and max(map(len, tables_only)) <= 120
    assert "pip install -r requirements.txt && pytest" in lines


def test_the_driver_in_the_repository_still_drives():
    from racer import load_driver
    from racer.training.evaluation import drive_lap

    driver = load_driver(ROOT / "drivers" / "every-track.pt")
    lap = drive_lap("every-track", driver, "track-03")
    assert lap.complete and lap.seconds < 17.4 and driver.args.random_tracks == 44
