"""Export a trained driver for the browser game: model.onnx and vecnorm_stats.json.

    python -m racer.export runs/NAME --game ../top-down-racer-02       # into the game, where it is raced
    python -m racer.export runs/NAME --out driver                      # into another folder

The game normalises observations with the stats, then runs the model. Files that would be replaced are kept as *.old; of several
exports, those before the first one. Needs: pip install onnx onnxruntime
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
import tyro

from racer.game.checks import UserError, quote, writing
from racer.game.launcher import GAME_ASSETS, check_folder
from racer.game.observations import OBS_HIGH, OBS_LOW, OBS_SIZE
from racer.training.checkpoints import load_driver
from racer.training.settings import as_command, run_as_script
from racer.training.terminal import print_safely

LARGEST_DIFFERENCE = 1e-5  # between the actions of the exported model and of the checkpoint


@dataclasses.dataclass
class Args:
    checkpoint: tyro.conf.Positional[Path]
    """run folder (its best.pt) or checkpoint, of either algorithm"""
    game: Path | None = None
    """the game's folder: the driver goes where the game loads it from"""
    out: Path | None = None
    """another folder for the two files"""
    trainer: Path | None = None
    """the file that trained the driver, if that is not ppo_racer.py or sac_racer.py; it is imported"""


def export_driver(agent: torch.nn.Module, folder: Path) -> None:
    """Write the two files, after a check that the exported model acts as the agent does."""
    try:
        import onnx  # noqa: F401  torch.onnx needs it
        import onnxruntime
    except ImportError as error:
        raise UserError("an export needs packages that are not installed: pip install onnx onnxruntime") from error
    folder.mkdir(parents=True, exist_ok=True)
    stats = {"obs_mean": agent.obs_mean.tolist(), "obs_var": agent.obs_var.tolist()}
    stats |= {"clip_obs": agent.NORM_CLIP, "epsilon": agent.NORM_EPSILON}
    with tempfile.TemporaryDirectory(dir=folder) as temporary:  # what is there stays until the new files are checked
        path = Path(temporary) / "model.onnx"
        path.with_name("vecnorm_stats.json").write_text(json.dumps(stats, indent=2) + "\n", encoding="utf-8")
        names = {"input_names": ["obs"], "output_names": ["actions"], "opset_version": 13}
        names["dynamic_axes"] = {"obs": {0: "batch"}, "actions": {0: "batch"}}
        if "dynamo" in inspect.signature(torch.onnx.export).parameters:
            names["dynamo"] = False  # the newer exporter writes a second file, which a browser does not load
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(agent, (torch.zeros(1, OBS_SIZE),), str(path), **names)
        difference = difference_of_export(agent, onnxruntime.InferenceSession(path.read_bytes()), stats)
        if not difference <= LARGEST_DIFFERENCE:
            found = "the exported model gives different actions than the checkpoint"
            raise UserError(f"{found}: they differ by {difference:g}. Nothing was replaced")
        for new in (path, path.with_name("vecnorm_stats.json")):
            old, kept = folder / new.name, folder / f"{new.name}.old"
            if old.exists() and not kept.exists():
                os.replace(old, kept)
                print_safely(f"{kept}: what was there before")
            os.replace(new, old)
    print_safely(f"{folder / path.name}: obs [batch, {OBS_SIZE}], normalised with vecnorm_stats.json -> actions [batch, 3]")
    print_safely(f"checked on 10,000 observations: the actions differ by at most {difference:.1e}")


def difference_of_export(agent: torch.nn.Module, session, stats: dict) -> float:
    """The largest difference between the actions of a driver and of its export, on observations at random."""
    obs = np.random.default_rng(0).uniform(OBS_LOW, OBS_HIGH, (10_000, OBS_SIZE)).astype(np.float32)
    normalized_obs = (obs - np.float32(stats["obs_mean"])) / np.sqrt(np.float32(stats["obs_var"]) + stats["epsilon"])
    clipped = np.clip(normalized_obs, -stats["clip_obs"], stats["clip_obs"]).astype(np.float32)
    (actions,) = session.run(None, {"obs": clipped})
    return float(np.abs(actions - agent.drive(obs)).max())


def run_export(args: Args) -> None:
    if bool(args.game) == bool(args.out):
        raise UserError("give either --game, the game's folder, or --out, another folder")
    if args.game:
        check_folder(args.game)
    folder = args.out or args.game / GAME_ASSETS
    driver = load_driver(args.checkpoint, args.trainer)
    with writing(folder):
        export_driver(driver.agent, folder)
    if args.game:
        print_safely(f"race it: cd {quote(args.game)} && pnpm dev")


@as_command
def main():
    run_export(tyro.cli(Args, prog="python -m racer.export", description=__doc__))


if __name__ == "__main__":
    run_as_script(main)
