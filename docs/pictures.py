"""The pictures of README.md and docs/: python docs/pictures.py

It draws from drivers/every-track.pt. Pages are photographed in Chromium, by playwright
(apt install chromium; pip install playwright). TensorBoard shows one short run, which is trained for it.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from racer.compare import Args, run_comparison, run_races  # noqa: E402
from racer.view.page import race_page  # noqa: E402
from racer.view.pictures import draw_laps  # noqa: E402

DRIVER = str(ROOT / "drivers" / "every-track.pt")
UNSEEN = [f"random-{number}" for number in (10_001, 10_004, 10_005, 10_008, 10_012, 10_020)]


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
    unseen_tracks().quantize(128).save(HERE / "unseen.png")
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        photograph_pages(chromium, Path(temporary))
        photograph_tensorboard(chromium, Path(temporary) / "runs")
