"""The README's pictures: python docs/pictures.py (ten minutes)

Runs stay in docs/runs, so that a second call only draws. The picture of TensorBoard needs Chromium (`apt install chromium`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import websocket
from PIL import Image, ImageDraw, ImageFont

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from callbacks_lite import read_csv  # noqa: E402
from racer.training.drivers import load_driver  # noqa: E402
from racer.training.evaluation import BEST_REWARD, best_hand_written, evaluate, fastest_lap, full_throttle, score  # noqa: E402
from racer.view.pictures import draw_laps  # noqa: E402
from racer.view.telemetry import Lap  # noqa: E402
from racer_env import RacerVectorEnv  # noqa: E402

RUNS = HERE / "runs"
THREE = "--track-id track-01 track-02 track-03 --seed 101"
COMMANDS = {  # run: what it is trained with
    "ppo-three-tracks": f"ppo_racer.py {THREE} --total-timesteps 8000000",
    "sac-three-tracks": f"sac_racer.py {THREE}",
    **{f"curve-ppo-{seed}": f"ppo_racer.py --eval-every 50000 --seed {seed}" for seed in (101, 102, 103)},
    **{f"curve-sac-{seed}": f"sac_racer.py --eval-every 50000 --seed {seed}" for seed in (101, 102, 103)},
    "every-track": "ppo_racer.py --random-tracks 24 --seed 101",
}
UNSEEN = [f"random-{number}" for number in (10_001, 10_004, 10_005, 10_008, 10_012, 10_020)]
TAGS = "eval/track-0[13]/(flying|percent_of_best_reward)|eval/track-0[23]/racing_line|rollout/ep_rew_mean"
CLOSE_SETTINGS = "[...document.querySelectorAll('button')].find(b => /Settings/.test(b.textContent))?.click()"
INK, GREY = (40, 40, 46), (200, 200, 204)
COLOURS = {"ppo": (31, 119, 180), "sac": (214, 90, 20)}


def letters(size: int) -> dict:
    return {"font": ImageFont.load_default(size=size), "fill": INK}


def learning_curves(size=(900, 420), left=70, bottom=50, most=2_000_000, low=6.0, high=7.6) -> Image.Image:
    """Reward of a deterministic episode over steps on track-01, beside the hand-written driver's and the best known."""
    picture = Image.new("RGB", size, "white")
    pen, (width, height) = ImageDraw.Draw(picture), size

    def place(steps: float, reward: float) -> tuple[float, float]:
        x = left + steps / most * (width - left - 20)
        return x, height - bottom - (max(reward, low) - low) / (high - low) * (height - bottom - 20)

    for reward in np.arange(low, high, 0.5):
        pen.line((*place(0, reward), *place(most, reward)), fill=GREY)
        pen.text((left - 8, place(0, reward)[1]), f"{reward:.1f}", anchor="rm", **letters(15))
    for steps in range(0, most + 1, 500_000):
        pen.text((place(steps, low)[0], height - bottom + 8), f"{steps / 1e6:g}M", anchor="ma", **letters(15))
    one, best = (
        score(evaluate(full_throttle, RacerVectorEnv(1), ["track-01"])),
        best_hand_written(["track-01"])["track-01"][0],
    )
    known = BEST_REWARD["track-01"]
    for name, reward in (("hand-written", one), ("hand-written, best of 28 settings", best), ("best known", known)):
        pen.line((*place(0, reward), *place(most, reward)), fill=INK, width=2)
        side, anchor = (-3, "rd") if reward == known else (4, "ra")
        pen.text((width - 24, place(0, reward)[1] + side), name, anchor=anchor, **letters(14))
    for path in sorted(RUNS.glob("curve-*")):
        algorithm = path.name.split("-")[1]
        rows = read_csv(path / "metrics.csv")
        way = [place(int(row["step"]), float(row["eval/mean_reward"])) for row in rows if row["eval/mean_reward"]]
        pen.line(way, fill=COLOURS[algorithm], width=2, joint="curve")
    for i, (algorithm, colour) in enumerate(COLOURS.items()):
        pen.text((width - 140 + 60 * i, height - bottom - 60), algorithm.upper(), **{**letters(20), "fill": colour})
    pen.text((left, height - 22), "steps; reward of an episode on track-01, seeds 101 to 103", **letters(14))
    return picture


def unseen_tracks(size: int = 300) -> Image.Image:
    """The fastest laps of a driver on tracks that it has never seen."""
    driver = load_driver(RUNS / "every-track")
    envs = RacerVectorEnv(len(UNSEEN), UNSEEN, render_mode="rgb_array")
    sheet = Image.new("RGB", (3 * size, 2 * size), "white")
    for i, episode in enumerate(evaluate(driver, envs, UNSEEN, complete=False)):
        tile = Image.fromarray(draw_laps([Lap.of("", **fastest_lap(episode))]))
        tile.thumbnail((size - 6, size - 6), Image.Resampling.LANCZOS)
        sheet.paste(tile, (i % 3 * size + (size - tile.width) // 2, i // 3 * size + (size - tile.height) // 2))
    return sheet


def tensorboard(path: Path) -> None:
    """A photograph of TensorBoard with both runs on three tracks, taken by a browser without a window."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("no Chromium, no new picture of TensorBoard")
        return
    logs = RUNS / "three"
    for name in ("ppo", "sac"):
        shutil.copytree(RUNS / f"{name}-three-tracks", logs / name, dirs_exist_ok=True)
    board, debug = free_port(), free_port()
    page = f"http://127.0.0.1:{board}/?tagFilter={urllib.parse.quote(TAGS)}#timeseries"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, contextlib.ExitStack() as at_end:
        options = ["--headless", "--no-sandbox", "--window-size=1500,950", "--enable-unsafe-swiftshader"]
        options += [f"--remote-debugging-port={debug}", f"--user-data-dir={profile}"]
        server = subprocess.Popen([sys.executable, "-m", "tensorboard.main", "--logdir", logs, "--port", str(board)])
        at_end.callback(server.kill)
        answer(f"http://127.0.0.1:{board}/data/runs")
        browser = subprocess.Popen([chromium, *options, page], stderr=subprocess.DEVNULL)
        at_end.callback(browser.wait)
        at_end.callback(browser.kill)
        targets = json.loads(answer(f"http://127.0.0.1:{debug}/json"))
        url = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
        tab = websocket.create_connection(url, suppress_origin=True)
        time.sleep(15)  # it loads
        ask(tab, "Runtime.evaluate", expression=CLOSE_SETTINGS)
        time.sleep(10)  # it draws
        path.write_bytes(base64.b64decode(ask(tab, "Page.captureScreenshot")["data"]))
    Image.open(path).quantize(128).save(path)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def answer(url: str) -> bytes:
    """What a server says, once it is there."""
    for _ in range(60):
        try:
            return urllib.request.urlopen(url, timeout=5).read()
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"no answer from {url}")


def ask(tab: websocket.WebSocket, method: str, **parameters) -> dict:
    """A command of the Chrome DevTools protocol."""
    tab.send(json.dumps({"id": 1, "method": method, "params": parameters}))
    while (reply := json.loads(tab.recv())).get("id") != 1:
        pass
    return reply["result"]


def main() -> None:
    for name, command in COMMANDS.items():
        if not (RUNS / name / "best.pt").exists():
            words = [sys.executable, *command.split(), "--run-dir", str(RUNS), "--run-name", name]
            subprocess.run(words, cwd=HERE.parent, check=True)
    shutil.copy(RUNS / "ppo-three-tracks" / "replay-track-03.gif", HERE / "lap.gif")
    learning_curves().save(HERE / "learning.png")
    unseen_tracks().quantize(128).save(HERE / "unseen.png")
    tensorboard(HERE / "tensorboard.png")


if __name__ == "__main__":
    main()
