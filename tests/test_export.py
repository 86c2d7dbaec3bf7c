"""The driver in the game: the exported pair acts as the checkpoint does, and drives the same laps."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MODULES, TINY, args_of, both, driver_of, one_in_short

from racer.export import Args, export_driver, run_export
from racer.game.observations import OBS_HIGH, OBS_LOW, OBS_SIZE
from racer.game.rules import ACTION_HIGH, ACTION_LOW
from racer.training.evaluation import evaluate
from racer_env import RacerVectorEnv


def trained(name: str, folder: Path, **settings) -> Path:
    """A run folder with a driver whose statistics are odd, so that leaving them out is noticed."""
    module = MODULES[name]
    args = module.Args(**{**TINY[name], "run_dir": folder, "total_timesteps": 1024, **settings})
    run = Path(module.train(args)["run_folder"])
    saved = torch.load(run / "best.pt", weights_only=True)
    saved["parts"]["agent"]["obs_mean"] += torch.linspace(-0.1, 0.1, OBS_SIZE)
    torch.save(saved, run / "best.pt")
    return run


def export(checkpoint: Path, folder: Path):
    """-> the agent, and what the game makes of the exported pair: observations (N, 14) -> inputs (N, 3)"""
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    run_export(Args(checkpoint, out=folder))
    assert sorted(file.name for file in folder.iterdir()) == ["model.onnx", "vecnorm_stats.json"]
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    stats = json.loads((folder / "vecnorm_stats.json").read_text())

    def drive(obs):
        """As the game's own loader does it, in double precision."""
        scaled = (obs - np.array(stats["obs_mean"])) / np.sqrt(np.array(stats["obs_var"]) + stats["epsilon"])
        scaled = np.clip(scaled, -stats["clip_obs"], stats["clip_obs"])
        return session.run(["actions"], {"obs": scaled.astype(np.float32)})[0]

    drive.session, drive.stats = session, stats
    return driver_of(checkpoint), drive


@both
def test_the_exported_pair_acts_as_the_checkpoint_does(tmp_path, name, capsys):
    agent, drive = export(trained(name, tmp_path), tmp_path / "driver")
    assert "the actions differ by" in capsys.readouterr().out
    assert set(drive.stats) == {"obs_mean", "obs_var", "clip_obs", "epsilon"}
    sizes = [(i.name, i.shape[1]) for i in (*drive.session.get_inputs(), *drive.session.get_outputs())]
    assert sizes == [("obs", 14), ("actions", 3)]
    obs = np.random.default_rng(1).uniform(OBS_LOW, OBS_HIGH, (10_000, OBS_SIZE)).astype(np.float32)
    actions = drive(obs)
    np.testing.assert_allclose(actions, agent.drive(obs), atol=1e-5)
    assert (actions >= ACTION_LOW).all() and (actions <= ACTION_HIGH).all() and actions.std() > 0.001
    scaled = (obs - drive.stats["obs_mean"]) / np.sqrt(np.array(drive.stats["obs_var"]) + 1e-6)
    assert np.abs(scaled).max() > drive.stats["clip_obs"], "else nobody has tried clipping"


@one_in_short
def test_a_driver_that_does_not_see_the_arc_is_exported_as_blind_to_it(tmp_path, name):
    agent, drive = export(trained(name, tmp_path, hide_arc=True), tmp_path / "driver")
    obs = np.random.default_rng(1).uniform(OBS_LOW, OBS_HIGH, (100, OBS_SIZE)).astype(np.float32)
    elsewhere = obs.copy()
    elsewhere[:, 12] = 1 - obs[:, 12]
    for driver in (agent.drive, drive):
        np.testing.assert_allclose(driver(obs), driver(elsewhere), atol=1e-6)
        assert np.abs(driver(obs) - driver(obs[::-1].copy())).max() > 1e-3, "it sees the rest"


@pytest.mark.slow
@both
def test_the_exported_pair_drives_the_same_laps(tmp_path, name):
    changes = {"total_timesteps": 300_000 if name == "ppo" else 20_000, "run_dir": tmp_path, "tensorboard": False}
    args = args_of(name, *(["--slow-game"] if name == "sac" else []), **changes)
    folder = Path(MODULES[name].train(args)["run_folder"])
    agent, drive = export(folder, tmp_path / "driver")
    envs = RacerVectorEnv(1)
    (own,), (exported,) = (evaluate(d, envs, ["track-01"]) for d in (agent.drive, drive))
    assert len(own.laps) >= 4 and exported.laps == own.laps


def test_an_export_needs_a_place():
    for given in ({}, {"out": Path("a"), "game": Path("b")}):
        with pytest.raises(ValueError, match="either --game, the game's folder, or --out"):
            run_export(Args(Path("runs/NAME"), **given))


@pytest.mark.slow
def test_what_export_misses_is_said(tmp_path, monkeypatch):
    run = trained("ppo", tmp_path)
    real = builtins.__import__

    def without_onnx(name, *rest, **named):
        if name == "onnx":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_onnx)
    with pytest.raises(ValueError, match="pip install onnx onnxruntime"):
        export_driver(driver_of(run), tmp_path)
