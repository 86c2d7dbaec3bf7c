"""The racing game as a Gymnasium environment: on the embedded engine, or in the real game behind its WebSocket bridge.

    import gymnasium as gym
    import racer_env                                                         # registers TopDownRacer-v0

    env = gym.make("TopDownRacer-v0")                                        # one car, embedded engine
    env = racer_env.RacerEnv(bridge_url="ws://localhost:9876")               # one car in the real game
    envs = racer_env.RacerVectorEnv(num_envs=256)                            # 256 cars, one batched engine
    envs = racer_env.RacerVectorEnv(8, bridge_url=["ws://localhost:9876", "ws://localhost:9877"])

Both backends give the same spaces, the same info and the same numbers. `RacerEnv`'s docstring is the specification. What the
cars drive on is in racer/game; reward terms of your own go into racer/game/rewards.py.

A mistake of the caller raises ValueError, a fault of the bridge raises BridgeError. In both cases the environment can be closed.
"""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from racer.game.bridge import BridgeError, GameRefusal, retry_pause_s
from racer.game.cars import check_actions, make_cars
from racer.game.checks import UserError, excerpt
from racer.game.config import load_config
from racer.game.episodes import Episodes, Fleet, add_tick, with_masks
from racer.game.observations import OBS_HIGH, OBS_LOW, OBS_SIZE, obs_moments  # noqa: F401  trainers take them from here
from racer.game.progress import PROGRESS, LineProgress
from racer.game.random_numbers import fleet_seeds
from racer.game.rewards import REWARD_TERMS
from racer.game.rules import ACTION_HIGH, ACTION_LOW, RESET_INFO, STEP_INFO, TICKS_PER_SECOND
from racer.game.tracks import has_shape, load_track

ENV_ID = "TopDownRacer-v0"

logger = logging.getLogger(__name__)


def make_spaces() -> tuple[gym.spaces.Box, gym.spaces.Box]:
    """One car's observation and action space, float32."""
    return gym.spaces.Box(OBS_LOW, OBS_HIGH), gym.spaces.Box(ACTION_LOW, ACTION_HIGH)


class RacerEnv(gym.Env):
    """One car on a closed track, seen from above. 60 ticks a second, one action a tick, deterministic.

    ## Action: Box([-1, 0, 0], [1, 1, 1], float32)

    | i | action   | range   |                                            |
    |---|----------|---------|--------------------------------------------|
    | 0 | steer    | [-1, 1] | positive is to the right                   |
    | 1 | throttle | [0, 1]  |                                            |
    | 2 | brake    | [0, 1]  |                                            |

    Finite values outside of the box are clamped; NaN, infinities and wrong shapes raise ValueError.

    ## Observation: Box(14, float32)

    | i    | observation                                                     | range   |
    |------|-----------------------------------------------------------------|---------|
    | 0-8  | distance to the nearest wall / 200, at -90, -67.5, ... +90      | [0, 1]  |
    |      | degrees from the heading (positive is counter-clockwise: left)  |         |
    | 9    | speed / 160                                                     | [0, 1]  |
    | 10   | yaw rate / 5 rad/s, clamped                                     | [-1, 1] |
    | 11   | steer as the car has smoothed it                                | [-1, 1] |
    | 12   | arc length along the centreline / length of the track           | [0, 1]  |
    | 13   | distance from the centreline / 80, clamped                      | [0, 1]  |

    ## Reward: the sum of six parts, weighted by the config file (`ai-config.json`, section "weights"), and of REWARD_TERMS

    | part       | value each tick                                                      | default weight |
    |------------|----------------------------------------------------------------------|----------------|
    | progress   | arc length gained / length of the track (a clean lap sums to 1)      | 1.0            |
    | speed      | speed / 160                                                          | 0.0            |
    | wall       | 1 while a wall is nearer than 2 units                                | -0.002         |
    | offTrack   | 1 while off the road                                                 | -0.001         |
    | backward   | 1 while arc length falls                                             | 0.0            |
    | stillness  | 1 while slower than stillnessSpeedThreshold                          | -0.001         |

    ## Start and end

    start="grid" is the game's: standing on the start line. start="anywhere" (embedded engine only): somewhere along the
    track, off the middle, not quite straight, at some speed; seeded by reset(seed=...). Only a lap from line to line
    counts, wherever the car began.

    terminated: slower than stillnessSpeedThreshold for stillnessTimeoutTicks in a row (180). truncated: maxSteps (3000).
    A finished lap or a crash ends nothing. With `stuck_ticks`, an episode is also truncated when the car has made no progress
    along the track for that many ticks.

    ## Info

    After a step the game's keys: the six parts by name, `tick rawSpeed lap checkpoint stepCount wallContact
    stillnessCounter`; after a reset `lap checkpoint stepCount`. `lap` starts at 1 and increases when a lap is completed;
    `checkpoint` is the last of the 30 gates crossed; `speed` is the reward part, `rawSpeed` the speed. Also `lapTicks`: how
    long the lap took that this step completed, else 0. Each of REWARD_TERMS is there by its name.

    ## Arguments

    track_id     "track-01" to "track-03", "random-1" and so on, or the path of a JSON file {"name", "control_points": [[x, y,
                 half_width], ...]}
    config_path  reward weights and limits in the game's schema, as a JSON file or a dict; default ai-config.json
    bridge_url   drive in the real game behind this URL, e.g. "ws://localhost:9876"; default: the embedded engine
    start        "grid" or "anywhere"
    stuck_ticks  truncate an episode after this many ticks without progress; 0: never
    render_mode  None or "rgb_array": the track, the car and its trail as (H, W, 3) uint8
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": TICKS_PER_SECOND}

    def __init__(
        self,
        track_id: str = "track-01",
        config_path: str | Path | dict | None = None,
        bridge_url: str | None = None,
        start: str = "grid",
        render_mode: str | None = None,
        stuck_ticks: int = 0,
    ):
        _check_render_mode(render_mode, bridge_url)
        self.observation_space, self.action_space = make_spaces()
        self.render_mode = render_mode
        if bridge_url is not None:
            self.metadata = {**self.metadata, "render_modes": []}
        self._state = "new"  # -> "running" <-> "ended", -> "closed"
        for argument, value in (("track_id", track_id), ("bridge_url", bridge_url)):
            if isinstance(value, (list, tuple)):
                found = f"{argument} is a list: {excerpt(value)}"
                raise UserError(f"{found}; one car takes one, RacerVectorEnv takes several")
        self.config = load_config(config_path)
        self._fleet = Fleet(make_cars(1, track_id, self.config, bridge_url, start), 1, stuck_ticks, bool(render_mode))
        # What gym.make would record, so that Gymnasium's tools can make another environment like this one.
        self.spec = copy.deepcopy(gym.spec(ENV_ID))
        arguments = {"track_id": track_id, "config_path": config_path, "bridge_url": bridge_url, "start": start}
        self.spec.kwargs = {**arguments, "render_mode": render_mode, "stuck_ticks": stuck_ticks}

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        _check_open(self._state)
        super().reset(seed=seed)
        seeds = [self.np_random_seed] if seed is not None or self._state == "new" else None
        self._state = "new"
        observations, info = self._fleet.reset(np.array([0]), seeds)
        self._state = "running"
        return observations[0], {key: int(value[0]) for key, value in info.items()}

    def step(self, action):
        _check_open(self._state)
        if self._state != "running":
            what = "the episode has ended" if self._state == "ended" else "the car is not on the track yet"
            raise UserError(f"step called, but {what}: call reset() first")
        actions = check_actions(action, (3,))[None]
        [(observations, rewards, terminated, truncated, stuck, info)] = self._fleet.ticks(actions)
        if stuck is not None:
            truncated = truncated | stuck
        if terminated[0] or truncated[0]:
            self._state = "ended"
        info = {key: STEP_INFO.get(key, float)(info[key][0]) for key in (*STEP_INFO, *REWARD_TERMS)}
        return observations[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), info

    def render(self):
        return _render(self._fleet.recorder, 0)

    def close(self) -> None:
        self._state = "closed"
        if hasattr(self, "_fleet"):
            self._fleet.cars.close()


def _check_render_mode(render_mode, bridge_url) -> None:
    modes = RacerEnv.metadata["render_modes"]
    if render_mode is not None and render_mode not in modes:
        raise UserError(f"unknown render_mode {render_mode!r}. Available: {', '.join(modes)}")
    if render_mode is not None and bridge_url is not None:
        raise UserError("render_mode needs the embedded engine, since the real game does not say where its cars are")


def _render(recorder, car: int) -> np.ndarray | None:
    if recorder is None:
        gym.logger.warn('nothing to render: make the environment with render_mode="rgb_array"')
        return None
    from racer.view.pictures import car_picture  # needs Pillow, which driving does not

    return car_picture(recorder.sim.world.tracks[recorder.sim.track[car]], recorder.running[car])


def _check_open(state: str) -> None:
    if state == "closed":
        raise UserError("this environment is closed; make a new one")


def _check_running(state: str) -> None:
    _check_open(state)
    if state != "running":
        raise UserError("the cars are not on the track yet: call reset() first")


class RacerVectorEnv(gym.vector.VectorEnv):
    """N cars at once, each as in RacerEnv. Embedded: one batched engine. Bridge: N connections, whose requests are all sent
    before any reply is read.

    Same-step autoreset: when an episode ends, `step` returns the first observation of the next one, and infos["final_obs"],
    infos["final_info"] with their masks `_final_obs`, `_final_info` hold the end of the last, as in Gymnasium's own vector
    environments. (Of the other infos, `lap`, `checkpoint` and `stepCount` are then those of the next episode.)
    infos["episode"] = {"r" return, "l" length in ticks, "t" seconds} with mask `_episode` comes along.

    Action repeat: a step holds the actions for `action_repeat` ticks, and an episode can end at each of them. What a car does
    after its end, until the step ends, counts nowhere. The reward of a step is the sum of its ticks' rewards, discounted by
    `gamma` per tick; reward parts in infos are plain sums, `lapTicks` is of a lap completed at any of the ticks, and the
    other infos are those of the last tick. infos["ticks"] says how many ticks of a car's episode the step took, and
    infos["discount"] the weight of what comes after: gamma^ticks, or 0 after a termination.

    Arguments as in RacerEnv, and
        num_envs     number of cars
        track_id     one track, or several: car i drives track_id[i % len(track_id)]
        bridge_url   one URL, or several: car i connects to bridge_url[i % len(bridge_url)]
        retries      maximum number of consecutive reconnect attempts after a fault of the bridge; 0: raise BridgeError
        stagger      truncate each car's first episode early, each at another time, so that with many cars not all episodes end
                     in the same tick
        off_road_penalty_scale   multiplies the config's offTrackPenalty: more than 1 makes careful drivers
        progress     "line": the rewards of steps count progress along the shortest line (racer/game/progress.py). Infos and returns
                     stay the config's, as do the rewards on a track that only the real game knows. Default: "centreline"
        action_repeat   ticks for which a step holds its actions
        gamma           discount factor per tick, within a step of several
        first_car    for a fleet shared by several processes: car i of this environment is car first_car + i of the fleet, which
                     determines its track and its seed
    reset(seed=s) gives every car a seed of its own, mixed from s and its number: two values of s share no starts. (Gymnasium's
    convention, s + i, would start car i of seed s like car i - 1 of seed s + 1.) A list of seeds is taken as it is.

    After a fault with retries left, all cars begin new episodes, staggered again. The old ones end as truncated, with the last
    observation that came from the game: a fault during a step moves no car, and the reward of this step is 0. `bridge_faults`
    counts the faults. infos["episode"]["cut"] marks episodes that `stagger` or a fault ended early.

    Wrappers: of gymnasium.wrappers.vector, those of actions and rewards work. Those of observations do not support same-step
    autoreset; `gym.make_vec(..., vectorization_mode="sync")` makes N separate environments, which take every wrapper.
    RecordEpisodeStatistics raises, because infos already hold "episode"; NormalizeReward counts first steps wrongly before
    Gymnasium's fix of August 2026.
    """

    metadata = {**RacerEnv.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self,
        num_envs: int = 64,
        track_id: str | Sequence[str] = "track-01",
        config_path: str | Path | dict | None = None,
        bridge_url: str | Sequence[str] | None = None,
        start: str = "grid",
        render_mode: str | None = None,
        retries: int = 0,
        stagger: bool = False,
        first_car: int = 0,
        stuck_ticks: int = 0,
        off_road_penalty_scale: float = 1.0,
        progress: str = "centreline",
        action_repeat: int = 1,
        gamma: float = 1.0,
    ):
        if not isinstance(action_repeat, (int, np.integer)) or action_repeat < 1:
            raise UserError(f"action_repeat is {action_repeat!r}; it must be a number of ticks, 1 or more")
        if progress not in PROGRESS:
            raise UserError(f"unknown progress {progress!r}. Available: {', '.join(PROGRESS)}")
        _check_render_mode(render_mode, bridge_url)
        self.render_mode, self.from_grid = render_mode, start == "grid"
        self.retries, self.bridge_faults, self._failures_in_a_row = retries, 0, 0
        self.first_car, self._state, self.action_repeat, self.gamma = first_car, "new", action_repeat, gamma
        self.config = load_config(config_path)
        scaled = copy.deepcopy(self.config)
        scaled["weights"]["offTrackPenalty"] *= off_road_penalty_scale
        self._make_cars = functools.partial(make_cars, num_envs, track_id, scaled, bridge_url, start, first_car)
        self.num_envs = int(num_envs)
        self._fleet = Fleet(self._make_cars(), self.num_envs, stuck_ticks, bool(render_mode))
        self._episodes = Episodes(self.num_envs, self.config["episode"]["maxSteps"], stagger)
        self.single_observation_space, self.single_action_space = make_spaces()
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, self.num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, self.num_envs)
        self._all_cars, self._no_car = np.ones(self.num_envs, bool), np.zeros(self.num_envs, bool)
        # What the reward of a step's n-th tick counts, and what comes after n ticks.
        self._discounts = np.cumprod([1.0, *[gamma] * action_repeat])
        along_line = progress == "line" and all(map(has_shape, self.track_ids))
        self._line = LineProgress(self.track_ids, self.config["weights"]["progress"]) if along_line else None

    @property
    def observations(self) -> np.ndarray:
        """The current observations (N, 14), also after set_state."""
        _check_running(self._state)
        return self._observations.copy()

    @property
    def track_ids(self) -> list[str]:
        """Of every car."""
        return list(self._fleet.cars.track_ids)

    @property
    def _sim(self):
        """The embedded engine, or None on a bridge."""
        return getattr(self._fleet.cars, "sim", None)

    @property
    def track_lengths(self) -> np.ndarray:
        """Of every car's track (N,), in units. 1 for a track that only the real game knows."""
        lengths = {t: load_track(t).length if has_shape(t) else 1.0 for t in set(self.track_ids)}
        return np.array([lengths[t] for t in self.track_ids])

    # -- state in, state out: what an exact resume needs -----------------------------------------------------------------

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything the next step depends on, as plain arrays. Empty on a bridge: the game does not expose its state."""
        if self._sim is None:
            return {}
        return {**self._sim.get_state(), **self._episodes.get_state(), **self._fleet.stuck.get_state()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from get_state(), bit-exact."""
        _check_open(self._state)
        if self._sim is None:
            raise UserError("the state of the real game cannot be set; only that of the embedded engine can")
        self._episodes.check_state(state)
        self._sim.set_state(state)
        self._episodes.set_state(state)
        self._fleet.stuck.set_state(state)
        self._state = "running"
        self._observations = self._sim.observe().astype(np.float32)
        if self._line:
            self._line.on_reset(slice(None), *self._fleet.cars.places())
        if self._fleet.recorder:
            self._fleet.recorder.begin(range(self.num_envs))

    # -- the Gymnasium interface ---------------------------------------------------------------------------------------

    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: dict | None = None):
        _check_open(self._state)
        seeds = fleet_seeds(seed, self.num_envs, self.first_car, self._state == "new")
        everyone = np.arange(self.num_envs)
        super().reset(seed=seed if isinstance(seed, int) else None)
        self._state = "new"
        try:
            self._observations, self._progress = self._fleet.cars.reset(everyone, seeds)
        except BridgeError as error:
            self._observations, self._progress = self._reconnect(error)
        self._state = "running"
        self._episodes.stagger_again()
        self._begin_episodes(everyone, self._observations)
        return self._observations.copy(), with_masks(self._progress, self._all_cars)

    def step(self, actions):
        _check_running(self._state)
        actions = check_actions(actions, (self.num_envs, 3))
        first = None  # observations and info of the episodes that begin in this step
        try:
            observations, rewards, terminated, done, cut, info = self._hold(actions)
        except BridgeError as error:
            first = self._reconnect(error)
            observations, rewards, terminated, done, cut, info = self._stand_still()
        else:
            self._failures_in_a_row = 0
        if done is not None and first is None:
            try:
                first = self._fleet.cars.reset(np.flatnonzero(done))
            except BridgeError as error:
                first = self._reconnect(error)
                done, cut = self._all_cars, cut | ~done
        ticks, discount = info.pop("ticks"), info.pop("discount")
        infos = with_masks(info, self._all_cars)
        infos["ticks"], infos["discount"] = ticks, discount
        truncated = self._no_car.copy() if done is None else done & ~terminated
        if first is not None:
            infos |= self._episodes.end(done, cut, observations, info)
            observations = self._begin_next(np.flatnonzero(done), observations, infos, *first)
        self._observations = observations
        self._progress = {key: infos[key] for key in RESET_INFO}
        return observations.copy(), rewards, terminated, truncated, infos

    def _hold(self, actions):
        """Give every car its action for `action_repeat` ticks, or until its episode ends.

        -> observations, rewards, terminated, done (None: nobody), cut, info. Of a car that is done, the observation is the last
        of its episode.
        """
        running, terminated, cut = self._all_cars, self._no_car.copy(), self._no_car
        ticks, info, last_observations = np.ones(self.num_envs, np.int64), None, None
        for number, tick in enumerate(self._fleet.ticks(actions, self.action_repeat)):
            seen, reward, dead, timed_out, stuck, now = tick
            learned = reward
            if self._line:
                learned = reward - now["progress"] + self._line.gain(*self._fleet.cars.places())
            if info is None:
                rewards, info = learned, now
            else:
                rewards = rewards + running * self._discounts[number] * learned
                ticks += running
                info = add_tick(info, now, running)
            now_cut = self._episodes.tick(reward, running)
            ends = dead | timed_out | now_cut
            if stuck is not None:
                ends |= stuck
            if ends.any() and (ends := ends & running).any():
                terminated, cut = terminated | (ends & dead), cut | now_cut
                if last_observations is None:
                    last_observations = np.zeros((self.num_envs, OBS_SIZE), np.float32)
                last_observations[ends] = self._fleet.cars.observe(np.flatnonzero(ends)) if seen is None else seen[ends]
                running = running & ~ends
        info["ticks"], info["discount"] = ticks, self._discounts[ticks]
        if last_observations is None:
            return seen, rewards, terminated, None, cut, info
        info["discount"][terminated] = 0.0
        return np.where(running[:, None], seen, last_observations), rewards, terminated, ~running, cut, info

    def _stand_still(self):
        """A step in which nothing happens and all episodes end, as from `_hold`."""
        info = {key: np.zeros(self.num_envs, STEP_INFO.get(key, float)) for key in (*STEP_INFO, *REWARD_TERMS)}
        info |= {**self._progress, "ticks": np.zeros(self.num_envs, np.int64), "discount": np.ones(self.num_envs)}
        return self._observations, np.zeros(self.num_envs), self._no_car.copy(), self._all_cars, self._all_cars, info

    def _reconnect(self, error: BridgeError):
        """New connections, and new episodes on all of them. -> observations, info. Raises the error if no retry is left.

        Set `retries` to 0 to stop waiting, for example in the handler of a signal.
        """
        self.bridge_faults += 1
        self._episodes.stagger_again()
        while self._failures_in_a_row < self.retries and not isinstance(error, GameRefusal):
            until = time.monotonic() + retry_pause_s(self._failures_in_a_row)
            self._failures_in_a_row += 1
            logger.warning(f"{error}\nReconnecting (attempt {self._failures_in_a_row} of {self.retries})")
            while self.retries and time.monotonic() < until:
                time.sleep(0.05)
            try:
                self._fleet.cars.close()
                self._fleet.cars = self._make_cars()
                return self._fleet.cars.reset(np.arange(self.num_envs))
            except BridgeError as again:
                error = again
        raise error

    def _begin_next(self, cars, observations, infos, first_observations, first_info) -> np.ndarray:
        """The next episodes of these cars. -> the observations, with the first ones of these cars"""
        self._begin_episodes(cars, first_observations)
        observations = observations.copy()
        observations[cars] = first_observations
        for key, value in first_info.items():
            infos[key] = infos[key].copy()
            infos[key][cars] = value
        return observations

    def _begin_episodes(self, cars, observations) -> None:
        self._fleet.begin(cars, observations, self._episodes.lengths[cars])
        self._episodes.begin(cars)
        if self._line:
            self._line.on_reset(cars, *self._fleet.cars.places(cars, observations))

    def render(self):
        recorder = self._fleet.recorder
        if recorder is None:
            return _render(recorder, 0)
        return tuple(_render(recorder, i) for i in range(self.num_envs))

    def trajectory(self, car: int, last_episode: bool = False) -> np.ndarray:
        """Where a car was in this episode, or in the last one (ticks + 1, 7): PLACE in episodes.py. Needs a render_mode."""
        recorder = self._fleet.recorder
        return np.array((recorder.last if last_episode else recorder.running)[car])

    @property
    def off_road(self) -> np.ndarray:
        """Which cars were off the road after the last tick (N,), also where it ended an episode."""
        return self._fleet.cars.off_road

    def close_extras(self, **_) -> None:
        self._state = "closed"
        if hasattr(self, "_fleet"):
            self._fleet.cars.close()


gym.register(id=ENV_ID, entry_point="racer_env:RacerEnv", vector_entry_point="racer_env:RacerVectorEnv")
