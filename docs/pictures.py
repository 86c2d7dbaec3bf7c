"""The pictures of README.md and docs/: python docs/pictures.py

It draws from drivers/every-track.pt, docs/results.json and docs/peers.json. Pages are photographed in Chromium, by playwright
(apt install chromium; pip install playwright). TensorBoard shows one short run, which is trained for it.
"""

from __future__ import annotations

import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import sync_playwright

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from racer.compare import Args, run_comparison, run_races  # noqa: E402
from racer.view.page import race_page  # noqa: E402
from racer.view.pictures import draw_laps  # noqa: E402

DRIVER = str(ROOT / "drivers" / "every-track.pt")
UNSEEN = [f"random-{number}" for number in (10_001, 10_004, 10_005, 10_008, 10_012, 10_020)]
CURVES = {  # what bench_racer.py calls it: its name in the picture, its colour
    "sac_racer.py --slow-game --eval-every 2000": ("sac_racer.py", (213, 94, 0)),
    "ppo_racer.py --slow-game --eval-every 2000": ("ppo_racer.py", (0, 114, 178)),
    "SB3 PPO, tuned": ("SB3's PPO, tuned", (110, 110, 118)),
}
INK, GREY = (40, 40, 46), (210, 210, 214)


def letters(size: int, fill=INK) -> dict:
    return {"font": ImageFont.load_default(size=size), "fill": fill}


def learning_curves(size=(900, 440), left=64, bottom=52, most=100_000, fast=6.0, slow=16.0) -> Image.Image:
    """Lap times over steps where steps are few: the median of the seeds, and their range."""
    picture = Image.new("RGB", size, "white")
    pen, (width, height) = ImageDraw.Draw(picture, "RGBA"), size
    entries = [e for name in ("results", "peers") for e in json.loads((HERE / f"{name}.json").read_text())[name] if "runs" in e]

    def place(steps: float, lap: float) -> tuple[float, float]:
        up = (min(lap, slow) - fast) / (slow - fast)
        return left + steps / most * (width - left - 24), height - bottom - up * (height - bottom - 20)

    for lap in range(int(fast), int(slow) + 1, 2):
        pen.line((*place(0, lap), *place(most, lap)), fill=GREY)
        pen.text((left - 8, place(0, lap)[1]), f"{lap} s" + (" +" if lap == slow else ""), anchor="rm", **letters(14))
    for steps in range(0, most + 1, 20_000):
        pen.text((place(steps, fast)[0], height - bottom + 8), f"{steps:,}", anchor="ma", **letters(14))
    for lap, name in ((385 / 60, "best known"), (442 / 60, "the published driver")):
        pen.line((*place(0, lap), *place(most, lap)), fill=INK)
        side, anchor = (3, "ra") if name == "best known" else (-2, "rd")
        pen.text((width - 26, place(0, lap)[1] + side), name, anchor=anchor, **letters(13))
    for number, (label, (name, colour)) in enumerate(CURVES.items()):
        runs = next(entry["runs"] for entry in entries if entry["label"] == label)
        by_step: dict[int, list[float]] = {}
        for run in runs:
            for step, lap, _ in run["evaluations"]:
                by_step.setdefault(step, []).append(lap or slow)
        whole = {step: laps for step, laps in sorted(by_step.items()) if len(laps) == len(runs)}
        low, high = ([place(step, pick(laps)) for step, laps in whole.items()] for pick in (min, max))
        pen.polygon([*low, *reversed(high)], fill=(*colour, 40))
        pen.line([place(step, statistics.median(laps)) for step, laps in whole.items()], fill=colour, width=3, joint="curve")
        pen.text((width - 320, 60 + 24 * number), f"{name}: median, range of {len(runs)}", **letters(17, colour))
    pen.text(
        (left, height - 22),
        "a lap of track-01 without noise, over steps of training; 16 s +: slower, or none",
        **letters(14),
    )
    return picture


def unseen_tracks(size: int = 300) -> Image.Image:
    """The driver for every track on six that it has never seen, beside the hand-written one."""
    sheet = Image.new("RGB", (3 * size, 2 * size), "white")
    for i, race in enumerate(run_races((DRIVER, "hand-written"), tuple(UNSEEN))):
        tile = Image.fromarray(draw_laps(race.laps))
        tile.thumbnail((size - 6, size - 6), Image.Resampling.LANCZOS)
        sheet.paste(tile, (i % 3 * size + (size - tile.width) // 2, i // 3 * size + (size - tile.height) // 2))
    return sheet


def photograph_pages(browser, folder: Path) -> None:
    page = folder / "race.html"
    races = run_races((DRIVER, "best", "hand-written"), ("track-03",))
    page.write_text(race_page("every-track · best · hand-written", races), encoding="utf-8")
    for scheme, name in (("light", "page"), ("dark", "page-dark")):
        tab = browser.new_page(viewport={"width": 1180, "height": 1180}, color_scheme=scheme)
        tab.goto(page.as_uri())
        tab.evaluate("play(false); jump(7.2)")
        tab.wait_for_function("!dirty")
        tab.screenshot(path=HERE / f"{name}.png")
        Image.open(HERE / f"{name}.png").resize((885, 885), Image.Resampling.LANCZOS).quantize(160).save(HERE / f"{name}.png")


def photograph_tensorboard(browser, folder: Path) -> None:
    for name, steps in (("ppo", 600_000), ("sac", 200_000)):
        words = ["--total-timesteps", str(steps), "--eval-every", "50000", "--run-dir", str(folder), "--run-name", name]
        subprocess.run([sys.executable, str(ROOT / f"{name}_racer.py"), *words], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--port", str(port)]) as server:
        for _ in range(60):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=5)
                break
            except OSError:
                time.sleep(1)
        tab = browser.new_page(viewport={"width": 1500, "height": 950})
        tags = "eval/(mean_reward|flying_lap|off_road|racing_line)|rollout/ep_rew"
        tab.goto(f"http://127.0.0.1:{port}/?tagFilter={tags}#timeseries")
        tab.wait_for_timeout(12_000)
        tab.screenshot(path=HERE / "tensorboard.png")
        server.kill()
    Image.open(HERE / "tensorboard.png").quantize(128).save(HERE / "tensorboard.png")


if __name__ == "__main__":
    run_comparison(Args((DRIVER, "best"), ("track-02",), gif=HERE / "race.gif"))
    learning_curves().save(HERE / "learning.png")
    unseen_tracks().quantize(128).save(HERE / "unseen.png")
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        photograph_pages(chromium, Path(temporary))
        photograph_tensorboard(chromium, Path(temporary) / "runs")
