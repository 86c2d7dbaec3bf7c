"""PPO's parts against their definitions, each with the wrong variant asserted to differ; and that it learns."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import drive, hold_up

import ppo_racer
from callbacks_lite import read_csv
from ppo_racer import (
    Agent,
    Args,
    Clock,
    RewardScaler,
    Storage,
    Team,
    compute_gae,
    estimate_values,
    evaluate,
    explained_variance,
    gaussian_logprob,
    make_optimizers,
    merge_moments,
    ppo_loss,
    rollout,
    train,
    update,
)
from racer_env import ACTION_HIGH, ACTION_LOW, OBS_SIZE, RacerVectorEnv


def small(tmp_path, **changes) -> Args:
    """A run of a second or two."""
    settings = {"total_timesteps": 4096, "num_envs": 16, "rollout_steps": 32, "minibatch_size": 128, "threads": 1}
    settings |= {"run_dir": tmp_path, "tensorboard": False, "eval_every": 10**9, "checkpoint_every": 10**9}
    return Args(**{**settings, **changes})


# -- advantages --------------------------------------------------------------------------------------------------------

GAMMA, LAMBDA = 0.9, 0.8


def random_rollout(seed=0, steps=12, cars=5):
    rng = np.random.default_rng(seed)
    rewards, values, next_values = (rng.normal(size=(steps, cars)) for _ in range(3))
    terminated, truncated = (rng.random((steps, cars)) < 0.12 for _ in range(2))
    ends = terminated | truncated
    next_values[:-1] = np.where(
        ends[:-1], next_values[:-1], values[1:]
    )  # only after an end is it another observation's
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


def test_gae_is_its_double_sum():
    data = random_rollout()
    assert data[3].any() and data[4].any()
    advantages, returns = compute_gae(*data, GAMMA, LAMBDA)
    np.testing.assert_allclose(advantages, gae_by_definition(*data), atol=1e-12)
    np.testing.assert_allclose(returns, advantages + data[1], atol=1e-12)


def test_truncation_bootstraps_but_termination_does_not():
    rewards, values, next_values = np.zeros((1, 2)), np.full((1, 2), 3.0), np.full((1, 2), 10.0)
    terminated, truncated = np.array([[True, False]]), np.array([[False, True]])
    advantages, _ = compute_gae(rewards, values, next_values, terminated, truncated, GAMMA, LAMBDA)
    assert advantages.tolist() == [[-3.0, GAMMA * 10 - 3.0]]


@pytest.mark.parametrize("wrong", ["truncation is termination", "termination is truncation", "lambda is not cut"])
def test_the_wrong_variants_of_gae_differ(wrong):
    rewards, values, next_values, terminated, truncated = data = random_rollout()
    nobody = np.zeros_like(terminated)
    right, _ = compute_gae(*data, GAMMA, LAMBDA)
    if wrong == "truncation is termination":
        other, _ = compute_gae(rewards, values, next_values, terminated | truncated, nobody, GAMMA, LAMBDA)
    elif wrong == "termination is truncation":
        other, _ = compute_gae(rewards, values, next_values, nobody, terminated | truncated, GAMMA, LAMBDA)
    else:
        other, _ = compute_gae(rewards, values, next_values * ~terminated, nobody, nobody, GAMMA, LAMBDA)
    assert np.abs(right - other).max() > 0.1


def test_with_lambda_1_returns_are_discounted_sums_of_rewards():
    rewards = np.random.default_rng(1).normal(size=(6, 3))
    last = np.zeros((6, 3), bool)
    last[-1] = True
    values = np.random.default_rng(2).normal(size=(6, 3))
    next_values = np.concatenate([values[1:], values[:1]])
    _, returns = compute_gae(rewards, values, next_values, last, ~last & False, GAMMA, 1.0)
    np.testing.assert_allclose(returns[0], sum(GAMMA**t * rewards[t] for t in range(6)))


def test_values_after_an_end_are_those_of_the_true_last_observation():
    agent, storage = Agent(), Storage(3, 2)
    storage.obs[:] = torch.randn(4, 2, OBS_SIZE)
    final = np.random.default_rng(0).normal(size=(1, OBS_SIZE)).astype(np.float32)
    storage.final_obs.append((1, np.array([1]), final))
    values, next_values = estimate_values(agent, storage)
    with torch.no_grad():
        assert next_values[1, 1] == pytest.approx(agent.value(torch.from_numpy(final)).item(), abs=1e-6)
        assert next_values[1, 1] != pytest.approx(agent.value(storage.obs[2, 1]).item(), abs=1e-4), "the next episode's"
        assert next_values[2, 0] == pytest.approx(agent.value(storage.obs[3, 0]).item(), abs=1e-6)
    np.testing.assert_allclose(next_values[0], values[1])


# -- rollout -----------------------------------------------------------------------------------------------------------


class Recorder:
    """What RaceStats would be told."""

    def step(self, infos):
        pass


def do_rollout(envs, agent, steps=20, seed=0):
    storage = Storage(steps, envs.num_envs)
    obs, _ = envs.reset(seed=seed)
    storage.obs[-1] = torch.from_numpy(obs)
    rollout(agent, envs, storage, Recorder(), torch.Generator().manual_seed(seed), Clock())
    return storage


def test_rollout_stores_what_was_seen_and_given(tmp_path):
    config = tmp_path / "short.json"
    config.write_text((Path(__file__).parent.parent / "ai-config.json").read_text().replace("3000", "7"))
    agent = Agent()
    storage = do_rollout(RacerVectorEnv(3, config_path=config), agent)
    again = RacerVectorEnv(3, config_path=config)
    obs, _ = again.reset(seed=0)
    for t in range(20):
        np.testing.assert_array_equal(storage.obs[t], obs)
        obs, rewards, _, truncated, infos = again.step(storage.actions[t].numpy())
        np.testing.assert_array_equal(storage.rewards[t], rewards)
        np.testing.assert_array_equal(storage.truncated[t], truncated)
        if truncated.any():
            tick, cars, final = storage.final_obs[(t + 1) // 7 - 1]
            assert tick == t and len(cars) == 3
            np.testing.assert_array_equal(final, np.stack(infos["final_obs"]))
    np.testing.assert_array_equal(storage.obs[20], obs)


def test_stored_logprobs_are_those_of_the_actions_that_were_given():
    agent = Agent(init_std=0.4)
    storage = do_rollout(RacerVectorEnv(4), agent)
    with torch.no_grad():
        mean = agent.actor(agent.normalize(storage.obs[:-1]))
        expected = torch.distributions.Normal(mean, agent.log_std.exp()).log_prob(storage.actions).sum(-1)
    torch.testing.assert_close(storage.logprobs, expected, atol=1e-4, rtol=1e-4)


# -- the policy --------------------------------------------------------------------------------------------------------


def test_gaussian_logprob_is_that_of_torch_and_integrates_to_one():
    log_std = torch.tensor([-1.0, 0.3, -0.2])
    noise = torch.randn(100, 3)
    expected = torch.distributions.Normal(0.0, log_std.exp()).log_prob(noise * log_std.exp()).sum(-1)
    torch.testing.assert_close(gaussian_logprob(noise, log_std), expected)
    one = torch.tensor([-0.7])
    x = torch.linspace(-8, 8, 4001).unsqueeze(1)
    density = gaussian_logprob((x - 0.5) / one.exp(), one).exp()
    assert torch.trapezoid(density, x[:, 0]).item() == pytest.approx(1.0, abs=1e-4)


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


def test_the_driver_without_noise_is_the_mean_within_the_box():
    agent = Agent()
    with torch.no_grad():
        agent.actor[-1].weight.mul_(300)
    obs = torch.rand(200, OBS_SIZE)
    with torch.no_grad():
        mean = agent.actor(agent.normalize(obs)).numpy()
    driven = agent.driver()(obs.numpy())
    np.testing.assert_allclose(driven, np.clip(mean, ACTION_LOW, ACTION_HIGH), atol=1e-4)
    assert (np.abs(mean - driven) > 0.1).any(), "some of these would leave the box"


def test_the_driver_starts_with_its_foot_down():
    agent = Agent()
    assert agent.driver()(np.zeros((1, OBS_SIZE), np.float32))[0, 1] > 0.8


# -- normalisation and scaling -----------------------------------------------------------------------------------------


def test_observation_statistics_live_in_the_network_and_are_those_of_all_batches():
    agent, batches = Agent(), [torch.randn(n, OBS_SIZE) * 3 + 1 for n in (50, 7, 400)]
    for batch in batches:
        agent.update_normalizer(batch)
    together = torch.cat(batches)
    torch.testing.assert_close(agent.obs_mean, together.mean(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(agent.obs_var, together.var(0, unbiased=False), atol=1e-4, rtol=1e-4)
    other = Agent()
    other.load_state_dict(agent.state_dict())
    obs = np.random.default_rng(0).random((5, OBS_SIZE)).astype(np.float32)
    np.testing.assert_array_equal(other.driver()(obs), agent.driver()(obs))
    assert not np.allclose(Agent().obs_mean, agent.obs_mean)


def test_statistics_are_gathered_for_norm_steps_and_then_frozen(tmp_path):
    def count(norm_steps):
        result = train(small(tmp_path, norm_steps=norm_steps, run_name=f"n{norm_steps}"))
        checkpoint = ppo_racer.load_checkpoint(result["run_folder"])
        return checkpoint["agent"]["obs_count"].item()

    assert count(0) == 0 and count(1000) == 1024 and count(10**9) == 4096


def test_merge_moments_is_one_pass_over_everything():
    a, b = np.random.default_rng(0).normal(2, 3, 40), np.random.default_rng(1).normal(-1, 1, 9)
    mean, var, count = merge_moments((a.mean(), a.var(), 40), (b.mean(), b.var(), 9))
    both = np.concatenate([a, b])
    assert (mean, var, count) == (pytest.approx(both.mean()), pytest.approx(both.var()), 49)


def test_reward_scaler_divides_by_the_deviation_of_discounted_returns_and_resets_them_at_an_end():
    rng = np.random.default_rng(3)
    rewards, done = rng.normal(size=(30, 4)), rng.random((30, 4)) < 0.2
    scaler = RewardScaler(4, 0.9)
    scaler.update(rewards, done)
    returns, seen = np.zeros(4), []
    for t in range(30):
        returns = 0.9 * returns + rewards[t]
        seen.append(returns)
        returns = np.where(done[t], 0.0, returns)
    np.testing.assert_allclose(scaler.deviation, np.std(seen), rtol=1e-4)
    never_reset = RewardScaler(4, 0.9)
    never_reset.update(rewards, np.zeros_like(done))
    assert np.abs(scaler.deviation - never_reset.deviation).min() > 1e-3
    np.testing.assert_array_equal(scaler.returns, np.where(done[-1], 0.0, seen[-1]))


def test_reward_scaler_treats_every_track_by_itself():
    rng = np.random.default_rng(4)
    rewards, done = rng.normal(size=(50, 7)), rng.random((50, 7)) < 0.1
    rewards[:, 1::3] *= 5  # cars 1 and 4 are on the second of three tracks, where rewards are larger
    together = RewardScaler(7, 0.9, num_tracks=3)
    together.update(rewards, done)
    for track in range(3):
        alone = RewardScaler(len(range(track, 7, 3)), 0.9)
        alone.update(rewards[:, track::3], done[:, track::3])
        np.testing.assert_array_equal(together.deviation[track::3], alone.deviation)
    assert together.deviation[1] > 3 * together.deviation[0]


def test_metrics_show_raw_rewards(tmp_path):
    result = train(small(tmp_path))
    rows = read_csv(Path(result["run_folder"]) / "metrics.csv")
    parts = [sum(float(row[f"reward/{p}"]) for p in ("progress", "wall", "offTrack", "stillness")) for row in rows]
    assert all(abs(total) < 0.005 for total in parts), (
        "a tick's raw reward is some thousandths; scaled it would be of order 1"
    )


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


def make_batch(agent, n=256, seed=0):
    g = torch.Generator().manual_seed(seed)
    obs = torch.randn(n, OBS_SIZE, generator=g)
    noise = torch.randn(n, 3, generator=g)
    with torch.no_grad():
        actions = agent.actor(obs) + agent.log_std.exp() * noise
    advantages = torch.randn(n, generator=g)
    batch = {"obs": obs, "actions": actions, "logprobs": gaussian_logprob(noise, agent.log_std).detach()}
    return {**batch, "advantages": advantages, "returns": torch.randn(n, generator=g)}


def run_update(agent, batch, **changes):
    args = Args(**{"num_envs": 16, "rollout_steps": 16, "minibatch_size": 64, "learning_rate": 1e-3, **changes})
    optimizers = make_optimizers(agent, args.learning_rate)
    return update(agent, optimizers, batch, args, torch.Generator().manual_seed(0), Team())


def test_update_makes_good_actions_more_probable_and_the_critic_better():
    torch.manual_seed(0)
    agent = Agent()
    batch = make_batch(agent)
    before = 0.5 * (agent.critic(batch["obs"]).squeeze(-1) - batch["returns"]).square().mean().item()
    run_update(agent, batch, update_epochs=10)
    with torch.no_grad():
        noise = (batch["actions"] - agent.actor(batch["obs"])) * torch.exp(-agent.log_std)
        change = gaussian_logprob(noise, agent.log_std) - batch["logprobs"]
        after = 0.5 * (agent.critic(batch["obs"]).squeeze(-1) - batch["returns"]).square().mean().item()
    good = batch["advantages"] > 0
    assert change[good].mean() > 0.02 > -0.02 > change[~good].mean()
    assert after < before


def test_target_kl_is_checked_per_minibatch_and_ends_the_update_of_the_actor():
    def moved(target_kl):
        torch.manual_seed(0)
        agent = Agent()
        actor, critic = (torch.nn.utils.parameters_to_vector(net.parameters()) for net in (agent.actor, agent.critic))
        actor, critic = actor.detach().clone(), critic.detach().clone()
        kl = run_update(agent, make_batch(agent), update_epochs=10, learning_rate=3e-3, target_kl=target_kl)[
            "train/approx_kl"
        ]
        return *((torch.nn.utils.parameters_to_vector(net.parameters()) - before).norm().item()
                 for net, before in ((agent.actor, actor), (agent.critic, critic))), kl  # fmt: skip

    free, critic, kl = moved(None)
    held, critic_too, held_kl = moved(1e-4)
    assert held < free / 2 and held_kl < kl
    assert critic_too == critic  # the critic cannot go too far, and learns on


def test_an_update_does_not_depend_on_which_core_is_faster(monkeypatch):
    def after(slow):
        torch.manual_seed(0)
        agent = Agent()
        with monkeypatch.context() as patch:
            hold_up(patch, ppo_racer, slow)
            metrics = run_update(agent, make_batch(agent), update_epochs=2)
        return torch.nn.utils.parameters_to_vector(agent.parameters()).detach(), metrics

    (a, metrics_a), (b, metrics_b) = after("update_actor"), after("update_critic")
    assert torch.equal(a, b) and metrics_a == metrics_b


def test_an_error_in_the_critics_thread_reaches_the_caller():
    agent = Agent()
    batch = make_batch(agent)
    with pytest.raises(RuntimeError, match="size"):
        run_update(agent, {**batch, "returns": torch.zeros(len(batch["obs"]), 2)})


def test_what_is_not_a_number_is_noticed_in_metrics_and_in_weights():
    agent = Agent()
    ppo_racer.check_finite(agent, {"train/loss": 0.5}, 7)
    with pytest.raises(FloatingPointError, match="train/loss has become inf in update 7"):
        ppo_racer.check_finite(agent, {"train/loss": math.inf}, 7)
    with torch.no_grad():
        agent.critic[0].weight[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match=r"critic\.0\.weight are no finite numbers after update 7"):
        ppo_racer.check_finite(agent, {"train/loss": 0.5}, 7)


def test_entropy_bonus_keeps_the_deviation_up():
    def std(ent_coef):
        torch.manual_seed(0)
        agent = Agent()
        run_update(agent, make_batch(agent), ent_coef=ent_coef, update_epochs=5)
        return agent.log_std.mean().item()

    assert std(0.5) > std(0.0) + 0.01


def test_gradients_are_clipped():
    def moved(max_grad_norm):
        torch.manual_seed(0)
        agent = Agent()
        parts = {"actor": [agent.log_std, *agent.actor.parameters()], "critic": list(agent.critic.parameters())}
        starts = {name: torch.nn.utils.parameters_to_vector(part).detach().clone() for name, part in parts.items()}
        args = Args(num_envs=16, rollout_steps=16, minibatch_size=256, update_epochs=1, max_grad_norm=max_grad_norm)
        adam = make_optimizers(agent, 1.0)
        sgd = {name: torch.optim.SGD(adam[name].param_groups[0]["params"], lr=1.0) for name in parts}
        update(agent, sgd, make_batch(agent), args, torch.Generator().manual_seed(0), Team())
        return [(torch.nn.utils.parameters_to_vector(parts[name]) - starts[name]).norm().item() for name in parts]

    assert moved(0.01) == pytest.approx([0.01, 0.01], rel=1e-3)
    assert min(moved(1e9)) > 0.02


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
    assert math.isnan(explained_variance(np.zeros(5), np.ones(5)))


def test_minibatches_are_of_equal_size_even_where_a_rollout_does_not_divide(tmp_path, monkeypatch):
    sizes = []
    real = ppo_racer.ppo_loss
    monkeypatch.setattr(ppo_racer, "ppo_loss", lambda *a: (sizes.append(len(a[2])), real(*a))[1])
    result = train(small(tmp_path, num_envs=43, rollout_steps=3, minibatch_size=64, total_timesteps=500))
    assert result["finished"] and set(sizes) == {64, 65}, "129 samples: not 64, 64 and 1"


def test_a_run_gives_gae_scaled_rewards_and_each_kind_of_end_in_its_place(tmp_path, monkeypatch):
    """The wiring: what compute_gae is given in a real run with terminated and truncated episodes."""
    config = tmp_path / "short.json"
    text = (Path(__file__).parent.parent / "ai-config.json").read_text()
    config.write_text(text.replace("3000", "40").replace("180", "25").replace('Threshold": 2.0', 'Threshold": 18.0'))
    seen, scaled = [], []
    real_gae, real_scaler = ppo_racer.compute_gae, RewardScaler.update

    def scaler(self, rewards, done, gather):
        before = self.returns.copy()
        real_scaler(self, rewards, done, gather)
        scaled.append((rewards.copy(), done.copy(), before, rewards / self.deviation))

    monkeypatch.setattr(ppo_racer, "compute_gae", lambda *a: (seen.append(copy.deepcopy(a)), real_gae(*a))[1])
    monkeypatch.setattr(RewardScaler, "update", scaler)
    stored = []
    real_rollout = ppo_racer.rollout

    def rollout_(agent, envs, storage, *rest):
        real_rollout(agent, envs, storage, *rest)
        stored.append((storage.rewards.copy(), storage.terminated.copy(), storage.truncated.copy()))

    monkeypatch.setattr(ppo_racer, "rollout", rollout_)
    train(small(tmp_path, config_path=config, gamma=0.9, gae_lambda=0.8, num_envs=24))
    assert sum(s[1].sum() for s in stored) > 3 and sum(s[2].sum() for s in stored) > 3
    for (rewards, values, next_values, terminated, truncated, gamma, lam), (raw, done, _, out), (r, te, tr) in zip(
        seen, scaled, stored, strict=True
    ):
        np.testing.assert_array_equal(rewards, out)
        np.testing.assert_array_equal(raw, r)
        np.testing.assert_array_equal(done, te | tr)
        np.testing.assert_array_equal(terminated, te)
        np.testing.assert_array_equal(truncated, tr)
        assert values.shape == next_values.shape == r.shape and (gamma, lam) == (0.9, 0.8)
    for (_, done, _, _), (_, _, carried, _) in zip(scaled, scaled[1:], strict=False):
        assert (carried[done[-1]] == 0).all() and (carried[~done[-1]] != 0).any(), "reset at either end, kept otherwise"


def test_best_keeps_the_better_driver(tmp_path, monkeypatch):
    def fake(agent, envs, tracks, seed=None):
        return [ppo_racer.Episode("track-01", length=1)], np.zeros((1, 1, 3))

    monkeypatch.setattr(ppo_racer, "evaluate", fake)
    monkeypatch.setattr(ppo_racer, "eval_metrics", lambda episodes: {})
    monkeypatch.setattr(ppo_racer, "summarize", lambda episodes: {"track": "x", "laps": 0, "mean_reward": 0.0})
    values = []
    monkeypatch.setattr(ppo_racer, "score", lambda episodes: values[-1])
    scores = iter([1.0, 5.0, 3.0, 4.0])
    real = ppo_racer.evaluate_run

    def evaluate_run(run):
        values.append(next(scores))
        return real(run)

    monkeypatch.setattr(ppo_racer, "evaluate_run", evaluate_run)
    result = train(small(tmp_path, eval_every=1024))
    best = ppo_racer.load_checkpoint(Path(result["run_folder"]) / "best.pt")
    assert values == [1.0, 5.0, 3.0, 4.0] and result["best"]["score"] == 5.0
    assert best["counters"]["steps"] == 2048 and result["best"]["step"] == 2048


TAGS = {
    *(f"reward/{part}" for part in ("progress", "speed", "wall", "offTrack", "backward", "stillness")),
    *(
        f"racer/{name}"
        for name in ("mean_lap_time_sec", "best_lap_time_sec", "completion_rate", "episodes_this_rollout")
    ),
    *("rollout/ep_rew_mean", "rollout/ep_len_mean", "time/fps"),
    *("train/learning_rate", "train/entropy_loss", "train/policy_gradient_loss", "train/value_loss", "train/approx_kl"),
    *("train/clip_fraction", "train/loss", "train/explained_variance", "train/std", "train/clip_range"),
    *(
        "eval/mean_reward",
        "eval/mean_ep_length",
        "eval/completion_rate",
        "eval/mean_lap_time_sec",
        "eval/best_lap_time_sec",
        "eval/percent_of_best_lap",
    ),
}


def test_the_tags_of_a_real_run_are_the_promised_ones_and_show_early(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = Args(total_timesteps=250_000, num_envs=128, run_dir=tmp_path, eval_every=10**9)
    result = train(args)
    events = EventAccumulator(result["run_folder"]).Reload()
    scalars = set(events.Tags()["scalars"])
    assert scalars >= TAGS
    assert all(tag.startswith("time/") for tag in scalars - TAGS)
    assert events.Tags()["images"] == ["eval/racing_line", "eval/replay"]
    first = {tag: events.Scalars(tag)[0].step for tag in TAGS}
    assert first["rollout/ep_rew_mean"] <= 16_384, "from the first rollout"
    assert first["racer/mean_lap_time_sec"] < 200_000
    assert max(e.step for e in events.Scalars("time/fps")) == result["steps"]


def test_a_broken_pipe_does_not_end_the_run(tmp_path, monkeypatch):
    class Gone:
        def write(self, _):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

        def isatty(self):
            return False

    monkeypatch.setattr("sys.stdout", Gone())
    assert train(small(tmp_path))["finished"]


def test_a_picture_that_cannot_be_drawn_costs_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo_racer, "draw_best_lap", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="no picture of the best lap"):
        assert train(small(tmp_path))["finished"]


def test_a_loss_that_is_not_a_number_stops_the_run_and_is_not_saved(tmp_path, monkeypatch):
    args = small(tmp_path, checkpoint_every=512, run_name="nan")
    real, calls = ppo_racer.compute_gae, []

    def poisoned(*arguments):
        calls.append(1)
        advantages, returns = real(*arguments)
        return advantages, returns * (float("nan") if len(calls) == 4 else 1.0)

    monkeypatch.setattr(ppo_racer, "compute_gae", poisoned)
    with pytest.raises(FloatingPointError, match="train/value_loss has become nan in update 4"):
        train(args)
    checkpoint = ppo_racer.load_checkpoint(tmp_path / "nan")
    assert checkpoint["counters"]["iteration"] == 3
    assert all(torch.isfinite(value).all() for value in checkpoint["agent"].values())


# -- whole runs --------------------------------------------------------------------------------------------------------


def test_same_seed_same_numbers_and_another_seed_others(tmp_path):
    def weights(seed, name):
        result = train(small(tmp_path, seed=seed, run_name=name))
        return ppo_racer.load_checkpoint(result["run_folder"])["agent"]

    a, b, c = weights(3, "a"), weights(3, "b"), weights(4, "c")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["actor.0.weight"], c["actor.0.weight"])


def test_it_learns_to_drive_laps(tmp_path):
    """150,000 steps, a few seconds: from a standstill at the first corner to whole laps, with the default recipe."""
    args = Args(total_timesteps=150_000, num_envs=128, threads=1, run_dir=tmp_path, tensorboard=False, eval_every=10**9)
    before, _ = evaluate(Agent(), RacerVectorEnv(1), ["track-01"])
    result = train(args)
    after = result["best"]["episodes"][0]
    assert not before[0].lap_ticks
    assert after["laps"] >= 4 and after["failures"] == 0
    assert {"best.pt", "racing_line.png", "replay.gif"} <= {p.name for p in Path(result["run_folder"]).iterdir()}


def test_one_driver_on_several_tracks(tmp_path):
    result = train(small(tmp_path, track_id=("track-01", "track-02", "track-03"), num_envs=18, minibatch_size=64))
    assert [r["track"] for r in result["best"]["episodes"]] == ["track-01", "track-02", "track-03"]


def test_evaluation_times_laps_as_the_engine_does():
    class Good:
        def driver(self):
            return drive

    envs = RacerVectorEnv(2, ["track-01", "track-02"])
    episodes, actions = evaluate(Good(), envs, ["track-01", "track-02"])
    assert [e.length for e in episodes] == [3000, 3000] and len(actions) == 3000
    sim = RacerVectorEnv(2, ["track-01", "track-02"])
    sim.reset(seed=0)
    engine = sim._cars.sim
    laps = [[], []]
    for t in range(3000):
        before = engine.lap
        engine.step(actions[t].astype(np.float64))
        for i in np.flatnonzero(engine.lap > before):
            laps[i].append(int(engine.lap_ticks[i]))
    assert [e.lap_ticks for e in episodes] == laps and len(laps[0]) >= 3
    assert episodes[0].first_lap == laps[0][0] and episodes[0].flying_laps == laps[0][1:]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_envs", 0, "--num-envs is 0"),
        ("gamma", 1.5, "--gamma is 1.5; it must be between 0 and 1"),
        ("learning_rate", math.inf, "--learning-rate is inf"),
        ("init_throttle", math.nan, "--init-throttle is nan"),
        ("seed", 10**23, "--seed is 100000000000000000000000"),
        ("threads", 100_000, "--threads is 100000"),
        ("learning_rate", -1.0, "--learning-rate is -1.0"),
        ("target_kl", 0.0, "--target-kl is 0.0"),
        ("total_timesteps", 0, "--total-timesteps is 0"),
        ("minibatch_size", 10**9, "a rollout has only 16384 samples"),
        ("learning_rate", float("nan"), "--learning-rate is nan"),
    ],
)
def test_bad_settings_are_named(name, value, message):
    with pytest.raises(ValueError, match=message):
        Args(**{name: value})


def test_contradictory_settings_are_refused():
    with pytest.raises(ValueError, match="there are 3 tracks; each needs a car"):
        Args(num_envs=2, minibatch_size=8, track_id=("track-01", "track-02", "track-03"))
    with pytest.raises(ValueError, match="give one of them"):
        Args(resume=Path("a"), evaluate=Path("b"))


def test_defaults_fit_the_backend():
    embedded, bridge = Args(), Args(bridge_url=("ws://localhost:9876",))
    assert embedded.num_envs > bridge.num_envs and embedded.rollout_steps < bridge.rollout_steps
    assert Args(bridge_url=("ws://localhost:9876",), num_envs=3, rollout_steps=400).num_envs == 3
