"""What people change in a trainer is one edit in its file: each is made on a copy, which then trains, evaluates and exports."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import MODULES, ROOT, TINY, both, driver_of, evaluate_run, flags, load, one_in_short, short_episodes

from callbacks_lite import read_csv
from racer.export import Args as ExportArgs
from racer.export import run_export
from racer.game import observations
from racer.game.observations import OBS_SIZE
from racer.training.checkpoints import args_from_json
from racer.training.evaluation import evaluate
from racer_env import REWARD_TERMS, RacerEnv, RacerVectorEnv

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


def works(monkeypatch, module, name: str, folder, *words) -> None:
    """It trains, and what it has trained evaluates and exports."""

    def command(*words):
        monkeypatch.setattr(sys, "argv", [f"{name}_racer.py", *map(str, words)])
        assert module.main() == 0

    run, copy = folder / "edited", folder / f"edited_{name}.py"
    short = {**TINY[name], "total_timesteps": 2048, "config_path": short_episodes(folder, 300)}
    command(*words, *flags({**short, "run_dir": folder, "run_name": "edited"}))
    with pytest.raises(ValueError, match=rf"was trained by {copy.name}.*--trainer {run / copy.name}"):
        evaluate_run(run)
    evaluate_run(run, trainer=run / copy.name)
    if importlib.util.find_spec("onnx"):  # .ci/run installs it
        run_export(ExportArgs(run, out=folder / "driver", trainer=run / copy.name))


ACTIVATION = {"ppo": ("nn.ReLU()", "nn.Tanh()", MANY), "sac": ("nn.SiLU()", "nn.Tanh()", MANY)}
LAYER = {
    "ppo": (
        "linear(hidden, hidden),",
        "linear(hidden, hidden),\n        nn.ReLU(),\n        linear(hidden, hidden),",
        1,
    ),
    "sac": ("nn.Linear(hidden, hidden), ", "nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden), ", 1),
}
TUPLE = "    betas: tuple[float, float] = (0.9, 0.999)\n"
PATH = "    teacher: Path | None = None\n"  # and one without a docstring
FLAG = ("    gamma: Fraction", '    warp_drive: float = 0.5\n    """an idea"""\n    gamma: Fraction', 1)


@one_in_short
@pytest.mark.parametrize("change", ["activation", pytest.param("layer", marks=pytest.mark.slow)])
def test_another_network_is_one_edit(monkeypatch, tmp_path, name, change):
    edit = {"activation": ACTIVATION[name], "layer": LAYER[name]}[change]
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
def test_flags_of_any_plain_type_are_one_edit_and_come_back_from_a_checkpoint(monkeypatch, tmp_path, name):
    docs = '    """two lines\n    of help"""\n'
    edits = [("    gamma: Fraction", f"{TUPLE}{docs}{PATH}    gamma: Fraction", 1)]
    edits += [("lr=args.learning_rate, ", "lr=args.learning_rate, betas=args.betas, ", 1)]
    module = edited(name, tmp_path, *edits)
    given = ("--betas", "0.8", "0.99", "--teacher", str(tmp_path / "teacher.pt"))
    works(monkeypatch, module, name, tmp_path, *given)
    args = args_from_json(module.Args, load(name, tmp_path / "edited")["args"])
    assert args.betas == (0.8, 0.99) and args.teacher == tmp_path / "teacher.pt"
    optimizer = load(name, tmp_path / "edited")["parts"]["optimizer" if name == "ppo" else "actor_optimizer"]
    assert optimizer["param_groups"][0]["betas"] == (0.8, 0.99)
    monkeypatch.setattr(sys, "argv", [f"{name}_racer.py", "--resume", str(tmp_path / "edited"), "--betas", "0.9", "0.9"])
    assert module.main() == 2, "and cannot change when a run is resumed"


@both
def test_a_deviation_that_depends_on_the_state_is_one_edit(monkeypatch, tmp_path, name):
    """SAC's already does."""
    old = "return self.actor(normalized_obs), self.log_std"
    new = "return self.actor(normalized_obs), self.log_std + 0.1 * normalized_obs[..., :3]"
    module = edited(name, tmp_path, *([(old, new, 1)] if name == "ppo" else []))
    agent = module.make_agent(module.Args())
    obs, noise = torch.randn(50, OBS_SIZE), torch.randn(50, 3)
    mean, log_std = agent.policy(obs)
    assert log_std.shape == (50, 3)
    if name == "ppo":
        actions, logprobs = agent.sample(obs, noise)
        normal = torch.distributions.Normal(mean, log_std.exp())
        torch.testing.assert_close(logprobs, normal.log_prob(actions).sum(-1), atol=1e-4, rtol=1e-4)
        again, entropy = agent.logprob(obs, actions)
        torch.testing.assert_close(again, logprobs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(entropy, normal.entropy().sum(-1).mean(), atol=1e-4, rtol=1e-4)
        works(monkeypatch, module, name, tmp_path)


# What a user types into a script of their own, or at the top of a trainer.
REWARD = """
import numpy as np, {name}_racer
from racer_env import REWARD_TERMS
REWARD_TERMS["smooth"] = lambda observations, actions, info: -0.5 * np.abs(actions[:, 0])
{name}_racer.run_as_script({name}_racer.main)
"""


@one_in_short
def test_a_reward_of_one_s_own_is_one_line_that_training_evaluation_and_tags_follow(start, tmp_path, name, monkeypatch):
    script, run = tmp_path / "mine.py", tmp_path / "mine"
    script.write_text(REWARD.format(name=name))
    config = short_episodes(tmp_path, 300)
    settings = {**TINY[name], "total_timesteps": 2048, "config_path": config, "run_dir": tmp_path, "run_name": "mine"}
    process = start(name, script=script, **settings)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0 and f"python -m racer.evaluate {run}" in out, out
    monkeypatch.setitem(REWARD_TERMS, "smooth", lambda observations, actions, info: -0.5 * np.abs(actions[:, 0]))
    (mine,) = evaluate_run(run)
    monkeypatch.delitem(REWARD_TERMS, "smooth")
    assert float(read_csv(run / "metrics.csv")[0]["reward/smooth"]) < -0.01
    agent, given = driver_of(run), []
    (usual,) = evaluate(
        lambda obs: (given.append(agent.drive(obs)), given[-1])[1], RacerVectorEnv(1, config_path=config), ["track-01"]
    )
    assert mine["mean_reward"] == pytest.approx(sum(usual.rewards) - 0.5 * np.abs(np.array(given)[:, 0, 0]).sum())
    best = json.loads((run / "summary.json").read_text())["results"][0]
    assert best["mean_reward"] == pytest.approx(mine["mean_reward"]), "best.pt too"


def test_a_mistake_in_an_edit_looks_like_one_in_code_and_what_a_user_gave_is_a_line(monkeypatch, tmp_path, capsys):
    module = edited("ppo", tmp_path, ("td_errors = rewards + ", "td_errors = rewards[:-1] + ", 1))
    settings = {**TINY["ppo"], "total_timesteps": 512, "config_path": short_episodes(tmp_path, 60), "run_dir": tmp_path}
    monkeypatch.setattr(sys, "argv", ["edited_ppo.py", *flags(settings)])
    with pytest.raises(ValueError, match="could not be broadcast"):
        module.main()
    script = tmp_path / "wrong.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import edited_ppo as t; t.run_as_script(t.main)")
    command = [sys.executable, str(script), *flags(settings)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1 and "edited_ppo.py" in done.stderr and "in compute_gae" in done.stderr
    monkeypatch.setattr(sys, "argv", ["edited_ppo.py", "--gamma", "2"])
    assert module.main() == 2 and "--gamma is 2.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (lambda obs, actions, info: np.zeros((len(obs), 2)), r"'own' returned an array of shape \(3, 2\)"),
        (lambda obs, actions, info: np.array([0.0, np.nan, 1.0]), "'own' returned nan for car 1"),
        (lambda obs, actions, info: np.full(len(obs), np.inf), "'own' returned inf for car 0"),
    ],
)
def test_a_wrong_reward_term_is_named(monkeypatch, term, message):
    monkeypatch.setitem(REWARD_TERMS, "own", term)
    envs = RacerVectorEnv(3)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match=message):
        envs.step(np.zeros((3, 3)))


def test_an_observation_that_is_not_finite_is_named(monkeypatch):
    table = [*observations.OBSERVATIONS]
    table[9] = table[9]._replace(value=lambda sim, cars: sim.speed[cars] / 0.0 * 0.0)
    monkeypatch.setattr(observations, "OBSERVATIONS", tuple(table))
    with pytest.raises(ValueError, match="observation 'speed' is NaN or infinite"):
        RacerVectorEnv(2).reset(seed=0)


def test_settings_from_python_are_those_of_a_command_line_and_presets_say_what_they_set(capsys):
    args = MODULES["ppo"].read_args("--random-tracks 44 --seed 3")
    said = capsys.readouterr().out
    assert (args.random_tracks, args.seed, args.hidden, args.hide_arc) == (44, 3, 192, True)
    assert "--random-tracks sets " in said and "--hidden 192" in said and "--hide-arc" in said
    for value in (np.float64(1e-3), np.float32(1e-3)):
        assert type(MODULES["ppo"].Args(learning_rate=value).learning_rate) is float
    assert type(MODULES["sac"].Args(seed=np.int64(3)).seed) is int


def test_a_reward_term_counts_in_the_game_as_on_the_engine(good_bridge, monkeypatch, tmp_path):
    monkeypatch.setitem(
        REWARD_TERMS, "own", lambda observations, actions, info: observations[:, 9] - info["lap"] * actions[:, 2]
    )
    rewards = []
    for make in (RacerEnv, lambda **k: RacerVectorEnv(1, **k)):
        for url in (None, good_bridge.url):
            env = make(bridge_url=url)
            env.reset(seed=1)
            action = [0.0, 1.0, 2.0] if make is RacerEnv else np.array([[0.0, 1.0, 2.0]])  # the brake is clamped to 1
            obs, reward, *_, info = env.step(action)
            rewards.append(float(np.ravel(reward)[0]))
            assert np.ravel(info["own"])[0] == pytest.approx(np.ravel(obs)[9] - 1)
            env.close()
    np.testing.assert_allclose(rewards, rewards[0], atol=1e-6)
    assert rewards[0] < -0.9
    monkeypatch.setitem(REWARD_TERMS, "lap", lambda *_: 0)
    with pytest.raises(ValueError, match="'lap'"):
        env = RacerEnv()
        env.reset()
        env.step([0.0, 1.0, 0.0])


@pytest.mark.slow
@both
def test_an_observation_is_one_row_in_one_file(start, tmp_path, name):
    """In a copy of the project: it trains, hides the arc on random tracks, evaluates and reports the new size."""
    for file in ("ppo_racer.py", "sac_racer.py", "racer_env.py", "callbacks_lite.py", "ai-config.json"):
        shutil.copy(ROOT / file, tmp_path)
    shutil.copytree(ROOT / "racer", tmp_path / "racer", ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "racer" / "game" / "observations.py"
    text, end = table.read_text(), ")\n# fmt: on\nOBS_NAMES"
    assert end in text
    row = '    Observation("throttle", 0, 1, 0.7, 0.3, 0.9, 0.2, lambda sim, cars: sim.throttle[cars]),\n'
    table.write_text(text.replace(end, row + end))
    run, config = tmp_path / "runs" / "mine", short_episodes(tmp_path, 60)
    settings = {**TINY[name], "total_timesteps": 512, "config_path": config, "run_dir": run.parent, "run_name": "mine"}
    tracks = ["--random-tracks", "2"] if name == "ppo" else ["--track-id", "any-1", "any-2", "--hide-arc"]
    for words in ([f"{name}_racer.py", *tracks, *flags(settings)], ["-m", "racer.evaluate", str(run)]):
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
        assert done.returncode == 0, done.stderr
    agent = load(name, run)["parts"]["agent"]
    assert agent["actor.0.weight"].shape[1] == OBS_SIZE + 1
    np.testing.assert_allclose([agent["obs_mean"][-1], agent["obs_var"][-1]], [0.9, 0.04], rtol=1e-6)


@one_in_short
def test_old_checkpoints_evaluate_and_resume_with_a_new_flag(monkeypatch, tmp_path, name, capsys):
    old, new = MODULES[name], edited(name, tmp_path, FLAG)
    run = tmp_path / "old"
    settings = {**TINY[name], "config_path": short_episodes(tmp_path, 300), "run_name": "old"}
    old.train(old.Args(**settings, total_timesteps=1024, run_dir=tmp_path))
    evaluate_run(run, trainer=new.__file__)
    monkeypatch.setattr(sys, "argv", [f"{name}_racer.py", "--resume", str(run), "--total-timesteps", "2048"])
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
