"""Learning curves as a picture for documents: reward over steps and over seconds, a colour a command. Needs Pillow."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageFont

INKS = ((0, 114, 178), (213, 94, 0), (0, 158, 115), (122, 130, 139), (153, 122, 0), (28, 30, 33))
TEXT, GRID = (40, 40, 46), (218, 220, 224)
PANEL, MARGIN = (520, 360), (52, 46, 14, 58)  # size; left, bottom, right, top


def curve(runs: list[dict], which: int, points: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """The rewards of several runs on one axis: steps (0) or seconds (1), and the rewards there (runs, points)."""
    few = min(len(run["evaluations"]) for run in runs) < 3  # then the rewards of the cars that train
    lines = [np.array([[e[which], e[2]] for e in run["training" if few else "evaluations"]], float) for run in runs]
    at = np.linspace(max(line[0, 0] for line in lines), min(line[-1, 0] for line in lines), points)
    return at, np.array([np.interp(at, line[:, 0], line[:, 1]) for line in lines])


def round_values(low: float, high: float) -> np.ndarray:
    """A few round values within a range."""
    rough = max(high - low, 1e-9) / 4
    step = 10 ** np.floor(np.log10(rough)) * next(
        f for f in (1, 2, 5, 10) if f * 10 ** np.floor(np.log10(rough)) >= rough * 0.999
    )
    return np.round(np.arange(np.ceil(low / step), np.floor(high / step + 1e-9) + 1) * step, 9)


def draw_curves(commands: list[dict]) -> Image.Image:
    """Median and range of the seeds, side by side over steps and over seconds."""
    (width, height), (left, bottom, right, top) = PANEL, MARGIN
    drawn = [command for command in commands if command["runs"] and all(run["training"] for run in command["runs"])]
    picture = Image.new("RGB", (2 * width, height + 18 * len(drawn)), "white")
    pen, font = ImageDraw.Draw(picture, "RGBA"), ImageFont.load_default(size=13)
    for which, name in enumerate(("steps", "seconds of one run")):
        curves = [curve(command["runs"], which) for command in drawn]
        most = max((at[-1] for at, _ in curves), default=1.0)
        high = max((rewards.max() for _, rewards in curves), default=1.0)
        low = min((rewards.min() for _, rewards in curves), default=0.0)
        low = max(low, high - 4 * max(high - min((np.median(r[:, -1]) for _, r in curves), default=0.0), 0.25))

        def place(x: float, y: float, which=which, most=most, low=low, high=high) -> tuple[float, float]:
            across = left + x / most * (width - left - right)
            return which * width + across, height - bottom - (max(y, low) - low) / (high - low + 1e-9) * (height - bottom - top)

        for y in round_values(low, high):
            pen.line((*place(0, y), *place(most, y)), fill=GRID)
            pen.text((place(0, y)[0] - 6, place(0, y)[1]), f"{y:.4g}", anchor="rm", font=font, fill=TEXT)
        for x in round_values(0, most):
            pen.text((place(x, low)[0], height - bottom + 6), f"{x:,.6g}", anchor="ma", font=font, fill=TEXT)
        pen.text((which * width + left, 10), f"reward over {name}", font=font, fill=TEXT)
        for number, (at, rewards) in enumerate(curves):
            ink = INKS[number % len(INKS)]
            low_edge, high_edge = ([place(*p) for p in zip(at, edge, strict=True)] for edge in (rewards.min(0), rewards.max(0)))
            pen.polygon([*low_edge, *reversed(high_edge)], fill=(*ink, 36))
            pen.line([place(*p) for p in zip(at, np.median(rewards, 0), strict=True)], fill=ink, width=3, joint="curve")
    for number, command in enumerate(drawn):
        y = height + 18 * number
        pen.rectangle((left, y + 2, left + 14, y + 12), fill=INKS[number % len(INKS)])
        pen.text(
            (left + 22, y), f"{command['command']}: median and range of {len(command['runs'])} seeds", font=font, fill=TEXT
        )
    return picture
