"""PPO's parts against their definitions, each with the wrong variant asserted to differ; and that it learns."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, promised_tags, short_episodes

import ppo_racer
from callbacks_lite import read_csv
from ppo_racer import (
    Agent,
    Args,
    RewardScaler,
    Storage,
    compute_gae,
    explained_variance,
    gaussian_logprob,
    make_batch,
    ppo_loss,
    rollout,
    train,
    update,
)
from racer.game.observations import OBS_SIZE
from racer.game.rules import ACTION_HIGH, ACTION_LOW
from racer.training.evaluation import evaluate
from racer.training.terminal import Clock
from racer_env import RacerVectorEnv


def small(tmp_path, **changes) -> Args:
    """A run of a second or two."""
    settings = {**TINY["ppo"], "config_path": short_episodes(tmp_path, 300)}
    return Args(**{**settings, "total_timesteps": 4096, "run_dir": tmp_path, **changes})


# -- advantages --------------------------------------------------------------------------------------------------------

GAMMA, LAMBDA = 0.9, 0.8


def random_rollout(seed=0, steps=12, cars=5):
    rng = np.random.default_rng(seed)
    rewards, values, next_values = (rng.normal(size=(steps, cars)) for _ in range(3))
    terminated, truncated = (rng.random((steps, cars)) < 0.12 for _ in range(2))
    ends = terminated | truncated
    # Only after an end is it another observation's.
    next_values[:-1] = np.where(ends[:-1], next_values[:-1], values[1:])
    return rewards, values, next_values, terminated, truncated & ~terminated


def gae_by_definition(rewards, values, next_values, terminated, truncated):
    """advantage(t) = sum over l of (gamma lambda)^l delta(t + l), up to the end of the episode; car by car, tick by tick."""
    steps, cars = rewards.shape
    result = np.zeros_like(rewards)
    for n in range(cars):
        for t in range(steps):
            for later in range(t, steps):
                future = 0.0 if terminated[later, n] else next_values[later, n]
                delta = rewards[later, n] + GAMMA * future - values[later, n]
                result[t, n] += (GAMMA * LAMBDA) ** (later - t) * delta
                if terminated[later, n] or truncated[later, n]:
                    break
    return result


def test_gae_is_its_double_sum_and_the_wrong_variants_differ():
    rewards, values, next_values, terminated, truncated = data = random_rollout()
    assert terminated.any() and truncated.any()
    ends, nobody = terminated | truncated, np.zeros_like(terminated)
    advantages, returns = compute_gae(rewards, values, next_values, GAMMA * ~terminated, ends, LAMBDA)
    np.testing.assert_allclose(advantages, gae_by_definition(*data), atol=1e-12)
    np.testing.assert_allclose(returns, advantages + values, atol=1e-12)
    for wrong in (
        (GAMMA * ~ends, ends),  # truncation is termination
        (GAMMA * ~nobody, ends),  # termination is truncation
        (GAMMA * ~terminated, nobody),  # lambda is not cut
    ):
        assert np.abs(advantages - compute_gae(rewards, values, next_values, *wrong, LAMBDA)[0]).max() > 0.1


def test_with_lambda_1_returns_are_discounted_sums_of_rewards():
    rewards = np.random.default_rng(1).normal(size=(6, 3))
    last = np.zeros((6, 3), bool)
    last[-1] = True
    values = np.random.default_rng(2).normal(size=(6, 3))
    next_values = np.concatenate([values[1:], values[:1]])
    _, returns = compute_gae(rewards, values, next_values, GAMMA * ~last, last, 1.0)
    np.testing.assert_allclose(returns[0], sum(GAMMA**t * rewards[t] for t in range(6)))


def test_a_batch_is_of_scaled_rewards_each_kind_of_end_and_values_of_true_last_observations(monkeypatch):
    agent, storage, scaler, seen = Agent(), Storage(3, 2), RewardScaler(0.9, np.array([1000.0, 2000.0])), []
    rng = np.random.default_rng(0)
    storage.obs[:], storage.rewards[:] = torch.randn(4, 2, OBS_SIZE), rng.normal(size=(3, 2))
    storage.ended[2, 0] = storage.ended[1, 1] = True
    final = rng.normal(size=(1, OBS_SIZE)).astype(np.float32)
    storage.final_obs[1, 1] = torch.from_numpy(final[0])
    monkeypatch.setattr(ppo_racer, "compute_gae", lambda *a: (seen.append(a), compute_gae(*a))[1])
    batch, _ = make_batch(agent, storage, scaler, Args(gae_lambda=0.7))
    ((rewards, values, next_values, discounts, ended, gae_lambda),) = seen
    np.testing.assert_allclose(rewards, storage.rewards * scaler.scale)
    np.testing.assert_allclose(scaler.returns, [0, storage.rewards[2, 1] * 2000], err_msg="reset at either end")
    assert discounts is storage.discounts and ended is storage.ended and gae_lambda == 0.7
    advantages, returns = compute_gae(*seen[0])
    for name, expected in (("advantages", advantages), ("returns", returns)):
        np.testing.assert_allclose(batch[name], expected.reshape(-1), rtol=1e-6)

    def value(obs):
        with torch.no_grad():
            return pytest.approx(agent.value(agent.normalize(obs)).item(), abs=1e-5)

    assert values[0, 1] == value(storage.obs[0, 1]) and next_values[1, 1] == value(torch.from_numpy(final))
    assert next_values[1, 1] != value(storage.obs[2, 1]), "the next episode's"
    np.testing.assert_allclose(next_values[0], values[1])


# -- rollout -----------------------------------------------------------------------------------------------------------


def do_rollout(envs, agent, steps=20, seed=0):
    storage = Storage(steps, envs.num_envs)
    envs.reset(seed=seed)
    stats = SimpleNamespace(step=lambda _: None)
    rollout(agent, envs, storage, stats, Clock(), torch.Generator().manual_seed(seed))
    return storage


STILL = {"stillnessTimeoutTicks": 5, "stillnessSpeedThreshold": 999.0}


@pytest.mark.parametrize(("changes", "every"), [({}, 7), (STILL, 5)])
def test_rollout_stores_what_was_seen_and_given_and_each_kind_of_end(tmp_path, changes, every):
    config = short_episodes(tmp_path, 7, **changes)
    storage = do_rollout(RacerVectorEnv(3, config_path=config, gamma=0.9), Agent())
    again = RacerVectorEnv(3, config_path=config)
    obs, _ = again.reset(seed=0)
    for t in range(20):
        np.testing.assert_array_equal(storage.obs[t], obs)
        obs, rewards, terminated, truncated, infos = again.step(storage.actions[t].numpy())
        expected = (
            (storage.rewards, rewards),
            (storage.discounts, 0.9 * ~terminated),
            (storage.ended, terminated | truncated),
        )
        for stored, value in expected:
            np.testing.assert_array_equal(stored[t], value)
        if "final_obs" in infos:
            assert (t + 1) % every == 0
            np.testing.assert_array_equal(storage.final_obs[t], np.stack(infos["final_obs"]))
    np.testing.assert_array_equal(storage.obs[20], obs)
    assert (storage.ended.sum(), (storage.discounts == 0).sum()) == ((12, 12) if every == 5 else (6, 0))


def test_stored_logprobs_are_those_of_the_actions_that_were_given():
    torch.manual_seed(0)
    agent = Agent(init_std=0.4)
    storage = do_rollout(RacerVectorEnv(4), agent)
    with torch.no_grad():
        mean = agent.actor(agent.normalize(storage.obs[:-1]))
        expected = torch.distributions.Normal(mean, agent.log_std.exp()).log_prob(storage.actions).sum(-1)
    torch.testing.assert_close(storage.logprobs, expected, atol=1e-4, rtol=1e-4)


# -- the policy --------------------------------------------------------------------------------------------------------


def test_gaussian_logprob_is_that_of_torch():
    log_std = torch.tensor([-1.0, 0.3, -0.2])
    noise = torch.randn(100, 3)
    expected = torch.distributions.Normal(0.0, log_std.exp()).log_prob(noise * log_std.exp()).sum(-1)
    torch.testing.assert_close(gaussian_logprob(noise, log_std), expected)


def test_the_game_does_with_a_raw_action_what_it_does_with_the_clamped_one():
    """What is optimised is what is driven: the clamp is the environment's, so a raw sample and its clamp are one action."""
    a, b = RacerVectorEnv(2), RacerVectorEnv(2)
    a.reset(seed=0), b.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(50):
        raw = rng.normal(0.5, 1.5, (2, 3)).astype(np.float32)
        x, y = a.step(raw), b.step(np.clip(raw, ACTION_LOW, ACTION_HIGH))
        np.testing.assert_array_equal(x[0], y[0])
        np.testing.assert_array_equal(x[1], y[1])


def test_the_deterministic_driver_is_the_mean_within_the_box():
    agent = Agent()
    with torch.no_grad():
        agent.actor[-1].weight.mul_(300)
    obs = torch.rand(200, OBS_SIZE)
    with torch.no_grad():
        mean = agent.actor(agent.normalize(obs)).numpy()
    driven = agent.drive(obs.numpy())
    np.testing.assert_allclose(driven, np.clip(mean, ACTION_LOW, ACTION_HIGH), atol=1e-4)
    assert (np.abs(mean - driven) > 0.1).any(), "some of these would leave the box"


def test_the_driver_starts_with_its_foot_down():
    assert Agent().drive(np.zeros((1, OBS_SIZE), np.float32))[0, 1] > 0.8


def test_metrics_show_raw_rewards(tmp_path):
    result = train(small(tmp_path))
    rows = read_csv(Path(result["run_folder"]) / "metrics.csv")
    parts = [sum(float(row[f"reward/{p}"]) for p in ("progress", "wall", "offTrack", "stillness")) for row in rows]
    assert all(abs(total) < 0.005 for total in parts), "a raw tick pays some thousandths; scaled it would be of order 1"


# -- loss and update ---------------------------------------------------------------------------------------------------


def test_clipped_objective_by_hand():
    # ratios 1.5 and 0.5, normalised advantages +-1: gains are min(1.5, 1.2) and min(-0.5, -0.8)
    old = torch.zeros(2)
    new = torch.tensor([math.log(1.5), math.log(0.5)])
    loss, logratio = ppo_loss(new, old, torch.tensor([2.0, -2.0]), 0.2)
    assert loss.item() == pytest.approx(-(1.2 - 0.8) / 2, abs=1e-6)
    torch.testing.assert_close(logratio, new)
    unclipped = -(1.5 - 0.5) / 2
    assert loss.item() != pytest.approx(unclipped, abs=0.01)


def test_no_gradient_where_the_clip_holds():
    new = torch.tensor([math.log(1.5), math.log(0.5), 0.0, 0.0], requires_grad=True)
    loss, _ = ppo_loss(new, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2)
    loss.backward()
    assert new.grad[0] == 0 and new.grad[1] == 0 and new.grad[2] < 0 < new.grad[3]


def test_advantages_are_normalised_per_minibatch():
    new, advantages = torch.randn(50) * 0.1, torch.randn(50)
    a, _ = ppo_loss(new, torch.zeros(50), advantages, 0.2)
    b, _ = ppo_loss(new, torch.zeros(50), advantages * 40 + 7, 0.2)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def make_batch_of_noise(agent, n=256, seed=0):
    g = torch.Generator().manual_seed(seed)
    obs = torch.randn(n, OBS_SIZE, generator=g)
    noise = torch.randn(n, 3, generator=g)
    with torch.no_grad():
        actions = agent.actor(obs) + agent.log_std.exp() * noise
    advantages = torch.randn(n, generator=g)
    batch = {"normalized_obs": obs, "actions": actions, "logprobs": gaussian_logprob(noise, agent.log_std).detach()}
    return {**batch, "advantages": advantages, "returns": torch.randn(n, generator=g)}


def run_update(agent, batch, optimizer=None, **changes):
    args = Args(**{"num_envs": 16, "rollout_steps": 16, "minibatch_size": 64, "learning_rate": 1e-3, **changes})
    optimizer = optimizer or torch.optim.Adam(agent.parameters(), lr=args.learning_rate)
    return update(agent, optimizer, batch, args.ent_coef, args, torch.Generator().manual_seed(0))


def test_update_makes_good_actions_more_probable_and_the_critic_better():
    torch.manual_seed(0)
    agent = Agent()
    batch = make_batch_of_noise(agent)
    before = 0.5 * (agent.value(batch["normalized_obs"]) - batch["returns"]).square().mean().item()
    run_update(agent, batch, update_epochs=10)
    with torch.no_grad():
        noise = (batch["actions"] - agent.actor(batch["normalized_obs"])) * torch.exp(-agent.log_std)
        change = gaussian_logprob(noise, agent.log_std) - batch["logprobs"]
        after = 0.5 * (agent.value(batch["normalized_obs"]) - batch["returns"]).square().mean().item()
    good = batch["advantages"] > 0
    assert change[good].mean() > 0.02 > -0.02 > change[~good].mean()
    assert after < before


def test_target_kl_is_checked_before_every_step_and_ends_the_update():
    def moved(target_kl):
        torch.manual_seed(0)
        agent = Agent()
        before = torch.nn.utils.parameters_to_vector(agent.actor.parameters()).detach().clone()
        changes = {"update_epochs": 10, "learning_rate": 3e-3, "target_kl": target_kl}
        kl = run_update(agent, make_batch_of_noise(agent), **changes)["train/approx_kl"]
        after = torch.nn.utils.parameters_to_vector(agent.actor.parameters())
        return (after - before).norm().item(), kl

    free, kl = moved(None)
    held, held_kl = moved(1e-4)
    assert held < free / 2 and held_kl < kl


def test_entropy_bonus_keeps_the_deviation_up():
    def std(ent_coef):
        torch.manual_seed(0)
        agent = Agent()
        run_update(agent, make_batch_of_noise(agent), ent_coef=ent_coef, update_epochs=5)
        return agent.log_std.mean().item()

    assert std(0.5) > std(0.0) + 0.01


def test_gradients_are_clipped():
    def moved(max_grad_norm):
        torch.manual_seed(0)
        agent = Agent()
        start = torch.nn.utils.parameters_to_vector(agent.parameters()).detach().clone()
        sgd = torch.optim.SGD(agent.parameters(), lr=1.0)
        changes = {"minibatch_size": 256, "update_epochs": 1, "max_grad_norm": max_grad_norm}
        run_update(agent, make_batch_of_noise(agent), sgd, **changes)
        return (torch.nn.utils.parameters_to_vector(agent.parameters()) - start).norm().item()

    assert moved(0.01) == pytest.approx(0.01, rel=1e-3)
    assert moved(1e9) > 0.02


def test_minibatches_hold_every_sample_once_and_in_a_new_order_each_time():
    batch = {"returns": torch.arange(100.0), "actions": torch.arange(100.0) * 2}
    generator = torch.Generator().manual_seed(0)
    first, second = (ppo_racer.minibatches(batch, 3, generator) for _ in range(2))
    assert sorted(len(mb["returns"]) for mb in first) == [33, 33, 34]
    assert torch.equal(torch.cat([mb["returns"] for mb in first]).sort().values, batch["returns"])
    assert all(torch.equal(mb["actions"], 2 * mb["returns"]) for mb in first + second)
    assert not torch.equal(first[0]["returns"], second[0]["returns"])


def test_learning_rate_anneals_to_zero(tmp_path):
    def rates(**changes):
        result = train(small(tmp_path, learning_rate=1e-3, **changes))
        rows = read_csv(Path(result["run_folder"]) / "metrics.csv")
        return [float(row["train/learning_rate"]) for row in rows]

    assert rates() == pytest.approx([1e-3 * (1 - i / 8) for i in range(8)])
    assert rates(anneal_lr=False) == [1e-3] * 8


def test_explained_variance():
    returns = np.random.default_rng(0).normal(size=100)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.zeros(100), returns) == pytest.approx(0.0)
    assert explained_variance(np.zeros(5), np.ones(5)) == 0.0, "no better than a constant"


def test_minibatches_are_of_equal_size_even_where_a_rollout_does_not_divide(tmp_path, monkeypatch):
    sizes = []
    real = ppo_racer.ppo_loss
    monkeypatch.setattr(ppo_racer, "ppo_loss", lambda *a: (sizes.append(len(a[2])), real(*a))[1])
    result = train(small(tmp_path, num_envs=43, rollout_steps=3, minibatch_size=64, total_timesteps=500))
    assert result["finished"] and set(sizes) == {64, 65}, "129 samples: not 64, 64 and 1"


def test_the_tags_of_a_real_run_are_the_promised_ones_and_show_early(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = Args(total_timesteps=250_000, num_envs=128, run_dir=tmp_path, eval_every=10**9)
    result = train(args)
    events = EventAccumulator(result["run_folder"]).Reload()
    scalars, promised = set(events.Tags()["scalars"]), promised_tags("ppo")
    assert scalars >= promised, promised - scalars
    assert all(tag.startswith(("time/", "eval/")) for tag in scalars - promised)
    assert events.Tags()["images"] == ["eval/racing_line", "eval/replay"]
    first = {tag: events.Scalars(tag)[0].step for tag in promised}
    assert first["rollout/ep_rew_mean"] <= 16_384, "from the first rollout"
    assert first["racer/mean_lap_time_sec"] < 200_000
    assert max(e.step for e in events.Scalars("time/fps")) == result["steps"]
    text = events.Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val[0].decode()
    for name in ("command", "commit", "num_envs", "gamma"):
        assert f"| {name} | " in text


# -- whole runs --------------------------------------------------------------------------------------------------------


def test_it_learns_to_drive_laps(tmp_path):
    """150,000 steps, a few seconds: from a standstill at the first corner to whole laps, with the default recipe."""
    args = Args(total_timesteps=150_000, num_envs=128, run_dir=tmp_path, tensorboard=False, eval_every=10**9)
    before = evaluate(Agent().drive, RacerVectorEnv(1), ["track-01"])
    result = train(args)
    after = result["best"]["results"][0]
    assert not before[0].laps
    assert after["laps"] >= 4 and after["failures"] == 0
    assert {"best.pt", "racing_line.png", "replay.gif"} <= {p.name for p in Path(result["run_folder"]).iterdir()}


def test_one_driver_on_several_tracks(tmp_path):
    result = train(small(tmp_path, track_id=("track-01", "track-02", "track-03"), num_envs=18, minibatch_size=64))
    assert [r["track"] for r in result["best"]["results"]] == ["track-01", "track-02", "track-03"]


def test_a_rollout_has_to_hold_a_minibatch():
    with pytest.raises(ValueError, match=r"--minibatch-size is 1000000000.* 3072 "):
        Args(minibatch_size=10**9)
