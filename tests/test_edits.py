"""What people change in a trainer is one edit in its file: each is made on a copy, which then trains, evaluates and exports."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest
from conftest import MODULES, ROOT, TINY, both, flags, load, one_in_short, short_episodes

from racer_env import RacerEnv

MANY = 100  # replace all that are found


def edited(name: str, folder, *edits):
    """A copy of the trainer as a module, in which every `old` is `new`."""
    text = (ROOT / f"{name}_racer.py").read_text()
    for old, new, count in edits:
        assert text.count(old) >= 1, f"{name}_racer.py has no {old!r} any more"
        text = text.replace(old, new, count)
    path = folder / f"edited_{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def works(monkeypatch, module, name: str, folder) -> None:
    """It trains, and what it has trained evaluates and exports."""

    def command(*words):
        monkeypatch.setattr(sys, "argv", [f"{name}_racer.py", *map(str, words)])
        assert module.main() == 0

    run = folder / "edited"
    short = {**TINY[name], "total_timesteps": 2048, "config_path": short_episodes(folder, 300)}
    command(*flags({**short, "run_dir": folder, "run_name": "edited"}))
    command("--evaluate", run, "--episodes", 1)
    if importlib.util.find_spec("onnx"):  # .ci/run installs it
        command("--export", folder / "driver", "--checkpoint", run)


ACTIVATION = {"ppo": ("nn.ReLU()", "nn.Tanh()", MANY), "sac": ("nn.SiLU()", "nn.Tanh()", MANY)}
LAYER = {
    "ppo": (
        "linear(hidden, hidden),",
        "linear(hidden, hidden),\n        nn.ReLU(),\n        linear(hidden, hidden),",
        1,
    ),
    "sac": ("nn.Linear(hidden, hidden), ", "nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden), ", 1),
}
FLAG = ("    gamma: Fraction", '    warp_drive: float = 0.5\n    """an idea"""\n    gamma: Fraction', 1)


@one_in_short
@pytest.mark.parametrize(
    "change", ["activation", *(pytest.param(c, marks=pytest.mark.slow) for c in ("layer", "flag"))]
)
def test_another_network_and_a_new_flag_are_one_edit(monkeypatch, tmp_path, name, change):
    edit = {"activation": ACTIVATION[name], "layer": LAYER[name], "flag": FLAG}[change]
    works(monkeypatch, edited(name, tmp_path, edit), name, tmp_path)
    actor = [key for key in load(name, tmp_path / "edited")["parts"]["agent"] if re.match(r"actor\..*weight", key)]
    assert len(actor) == 3 + (change == "layer")


@both
def test_a_network_with_another_activation_drives_with_it(monkeypatch, tmp_path, name):
    """The one that trains is the one that is evaluated and exported."""
    module, calls = edited(name, tmp_path, ACTIVATION[name]), []
    agent = module.make_agent(module.Args())
    for layer in agent.actor:
        layer.register_forward_hook(lambda layer, *_: calls.append(type(layer).__name__))
    agent.drive(RacerEnv().reset(seed=0)[0][None])
    assert "Tanh" in calls and not {"ReLU", "SiLU"} & set(calls)


@one_in_short
def test_old_checkpoints_evaluate_and_resume_with_a_new_flag(monkeypatch, tmp_path, name, capsys):
    old, new = MODULES[name], edited(name, tmp_path, FLAG)
    run = tmp_path / "old"
    settings = {**TINY[name], "config_path": short_episodes(tmp_path, 300), "run_name": "old"}
    old.train(old.Args(**settings, total_timesteps=1024, run_dir=tmp_path))
    for words in (("--evaluate", run, "--episodes", 1), ("--resume", run, "--total-timesteps", 2048)):
        monkeypatch.setattr(sys, "argv", [f"{name}_racer.py", *map(str, words)])
        assert new.main() == 0
    assert load(name, run)["args"]["warp_drive"] == 0.5 and load(name, run)["run"]["steps"] == 2048


def test_an_entropy_coefficient_that_falls_over_the_run_is_one_edit(monkeypatch, tmp_path):
    old = "update(agent, optimizer, batch, args.ent_coef, args, generator)"
    new = """update(agent, optimizer, batch, 0.01 * (1 - run.progress), args, generator)
                metrics["train/ent_coef"] = 0.01 * (1 - run.progress)"""
    works(monkeypatch, edited("ppo", tmp_path, (old, new, 1)), "ppo", tmp_path)
    text = (tmp_path / "edited" / "metrics.csv").read_text().splitlines()
    column = text[0].split(",").index("train/ent_coef")
    assert [float(row.split(",")[column]) for row in text[1:]] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


def test_a_second_value_network_is_one_edit(monkeypatch, tmp_path):
    network = "self.critic = mlp(hidden, 1, output_gain=1.0)"
    value = "return self.critic(normalized_obs).squeeze(-1)"
    both_values = "self.critic(normalized_obs), self.critic2(normalized_obs)"
    edits = [
        (network, f"{network}\n        {network.replace('critic', 'critic2')}", 1),
        (value, f"return torch.minimum({both_values}).squeeze(-1)", 1),
    ]
    works(monkeypatch, edited("ppo", tmp_path, *edits), "ppo", tmp_path)
    trained = load("ppo", tmp_path / "edited")["parts"]
    assert "critic2.0.weight" in trained["agent"] and len(trained["optimizer"]["state"]) == 1 + 6 * 3
