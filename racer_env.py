"""The racing game as a Gymnasium environment: on the embedded engine, or in the real game behind its WebSocket bridge.

    import gymnasium as gym
    import racer_env                                                         # registers TopDownRacer-v0

    env = gym.make("TopDownRacer-v0")                                        # one car, embedded engine
    env = racer_env.RacerEnv(bridge_url="ws://localhost:9876")               # one car in the real game
    envs = racer_env.RacerVectorEnv(num_envs=256)                            # 256 cars, one batched engine
    envs = racer_env.RacerVectorEnv(8, bridge_url=["ws://localhost:9876", "ws://localhost:9877"])

Both backends give the same spaces, the same info, the same numbers; `RacerEnv` is the contract, its docstring the spec.

    1  the contract     spaces, actions, the config file
    2  cars             embedded ones, and when they are put back (those on bridges are in racer_bridge.py)
    3  RacerEnv         one car
    4  RacerVectorEnv   N cars, same-step autoreset, episode statistics, reconnects to a bridge by itself
    5  RewardScaler     the scale of rewards that networks learn from

A mistake of the caller raises ValueError, a fault of the bridge raises BridgeError. Both leave an environment that can be closed.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from racer.game.bridge import RESET_INFO, STEP_INFO, BridgeCars, BridgeError
from racer.game.sim import (
    DEFAULT_CONFIG, NUM_RAYS, OBS_HIGH, OBS_LOW, OBS_NAMES, STARTS, TICKS_PER_SECOND, TRACKS, RacerSim, is_finite,
    load_track, start_of,
)  # fmt: skip
from racer.game.sim import OBS_SIZE as OBS_SIZE  # trainers have it from here

# == 1  The contract ===================================================================================================

ACTION_NAMES = ("steer", "throttle", "brake")
ACTION_LOW = np.array([-1.0, 0.0, 0.0], dtype=np.float32)
ACTION_HIGH = np.array([1.0, 1.0, 1.0], dtype=np.float32)
# Mean and deviation of observations, rounded, for networks: rays, speed, yaw rate, steer, arc, centreline distance.
OBS_MEAN = (*[0.25] * NUM_RAYS, 0.6, 0.0, 0.0, 0.5, 0.2)  # on the game's tracks, at a fair pace
OBS_STD = (*[0.2] * NUM_RAYS, 0.25, 0.3, 0.5, 0.3, 0.15)
# The same of good drivers on many tracks. Rays to the sides tell how wide the road is, and here they count for more.
BLIND_MEAN = (0.25, 0.27, 0.4, 0.7, 0.9, 0.7, 0.4, 0.27, 0.25, 0.8, 0.0, 0.0, 0.0, 0.15)
BLIND_STD = (0.07, 0.08, 0.17, 0.2, 0.16, 0.2, 0.17, 0.08, 0.07, 0.2, 0.25, 0.2, 1e15, 0.09)  # the arc vanishes

ENGINE_NAMES = {  # what the engine calls it, but for the reward parts
    "tick": "step_count", "rawSpeed": "speed", "lap": "lap", "checkpoint": "checkpoint", "stepCount": "step_count",
    "wallContact": "wall_contact", "stillnessCounter": "stillness",
}  # fmt: skip

ENV_ID = "TopDownRacer-v0"
DEFAULT_CONFIG_PATH = Path(__file__).with_name("ai-config.json")
NO_LIMIT = np.int64(2**62)
STAGGER_STRIDE = 7919  # a prime: with it, cars that are neighbours are far apart in the order of first endings
LONGEST_PAUSE_S = 30.0  # before connecting to a bridge again
TWIN_TICKS, TWIN_TOLERANCE = 240, 1e-4  # the game searches for the arc position to some thousandths of a unit

logger = logging.getLogger(__name__)


def make_spaces() -> tuple[gym.spaces.Box, gym.spaces.Box]:
    """Of one car's observations and actions, float32."""
    return gym.spaces.Box(OBS_LOW, OBS_HIGH), gym.spaces.Box(ACTION_LOW, ACTION_HIGH)


def obs_moments(hide_arc: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance (14,) for a network's normaliser; with `hide_arc` it does not see where on the track the car is."""
    mean, std = (BLIND_MEAN, BLIND_STD) if hide_arc else (OBS_MEAN, OBS_STD)
    return np.array(mean, np.float32), np.square(std, dtype=np.float32)


def load_config(config_path: str | Path | None = None) -> dict:
    """Reward weights and episode limits in the game's own schema, whole and checked. None: ai-config.json beside this file.

    Nothing is filled in: the game accepts a config with missing parts and then sends rewards that are not numbers.
    """
    if config_path is not None and not isinstance(config_path, (str, Path)):
        raise ValueError(f"config_path is {start_of(config_path)}; it must be the path of a JSON file")
    path = Path(config_path or DEFAULT_CONFIG_PATH)
    if path == DEFAULT_CONFIG_PATH and not path.exists():  # installed with pip, which takes the modules only
        return copy.deepcopy(DEFAULT_CONFIG)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config file {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config file {path} is not JSON: {error}") from error
    _check_keys(config, DEFAULT_CONFIG, f"config file {path}", "")
    for section, defaults in DEFAULT_CONFIG.items():
        _check_keys(config[section], defaults, f"config file {path}", f"{section}.")
        for key, value in config[section].items():
            wanted = "a whole number of ticks, 1 or more" if section == "episode" else "a finite number"
            fits = is_finite(value) and (section != "episode" or (isinstance(value, int) and value >= 1))
            if key == "stillnessSpeedThreshold":
                wanted, fits = "a speed, 0 or more", fits and value >= 0
            if not fits:
                found = f"config file {path}: {section}.{key} is {start_of(value)}"
                raise ValueError(f"{found}; it must be {wanted}, e.g. {defaults[key]}")
    return config


def _check_keys(found, expected: dict, source: str, prefix: str) -> None:
    keys = ", ".join(expected)
    if not isinstance(found, dict):
        what = f"{prefix[:-1]} is" if prefix else "it is"
        raise ValueError(f"{source}: {what} {start_of(found)}; it must be an object with the keys {keys}")
    for key in sorted(set(found) - set(expected)):
        near = difflib.get_close_matches(key, expected, n=1)
        hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {keys}"
        raise ValueError(f"{source}: unknown key {prefix}{key}; {hint}")
    for key in expected:
        if key not in found:
            example = json.dumps(expected[key])
            raise ValueError(f"{source}: {prefix}{key} is missing; the game needs the config whole, e.g. {example}")


def check_actions(actions, shape: tuple[int, ...]) -> np.ndarray:
    """Actions as finite float64 of that shape, or a ValueError that names the value. The box is not enforced: the game clamps."""
    try:
        array = np.asarray(actions)
    except ValueError as error:
        raise ValueError(f"action is ragged: {start_of(actions)}; it must have shape {shape}") from error
    if array.dtype.kind not in "fiu":
        found = f"action has dtype {array.dtype}: {start_of(actions)}"
        raise ValueError(f"{found}; it must be numbers {list(ACTION_NAMES)}")
    if array.shape != shape:
        wanted = f"{shape}: {list(ACTION_NAMES)}" + (" per car" * (len(shape) > 1))
        raise ValueError(f"action has shape {array.shape}; it must have shape {wanted}")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        name = f"action of car {where[0]}: " if len(where) > 1 else "action: "
        raise ValueError(f"{name}{ACTION_NAMES[where[-1]]} is {array[where]}; the game takes finite numbers only")
    return array


# == 2  Cars ============================================================================================================


class EmbeddedCars:
    """N cars on the embedded engine.

    The interface both backends have, this one and BridgeCars, arrays over cars throughout:
        reset(cars, seeds) -> observations (n, 14), info     cars: indices; seeds: one per car, or None to go on
        step(actions)      -> observations (N, 14), rewards, terminated, truncated, info
        close()            idempotent
        track_ids          of every car
        off_road           which cars left the road in the last tick (N,)
    """

    def __init__(self, num_cars: int, track_ids: Sequence[str], config: dict, start: str, first_car: int = 0):
        self.sim = RacerSim(num_cars, track_ids, config, start, first_car=first_car)
        self.track_ids = [track_ids[number] for number in self.sim.track]
        self.off_road = np.zeros(num_cars, bool)

    def reset(self, cars: np.ndarray, seeds: Sequence[int] | None = None):
        if seeds is not None:
            self.sim.seed_cars(cars, seeds)
        observations = self.sim.reset(cars).astype(np.float32)
        return observations, {key: getattr(self.sim, ENGINE_NAMES[key])[cars] for key in RESET_INFO}

    def step(self, actions: np.ndarray):
        sim = self.sim
        observations, rewards, terminated, truncated = sim.step(actions)
        self.off_road = sim.centre_distance > sim.half_width
        # Copies, so that callers cannot change the cars.
        info = sim.parts | {key: getattr(sim, name).copy() for key, name in ENGINE_NAMES.items()}
        return observations.astype(np.float32), rewards, terminated, truncated, info

    def close(self) -> None:
        pass


def retry_pause_s(failures: int) -> float:
    """How long to wait before connecting again, after so many failures in a row."""
    return min(2.0**failures, LONGEST_PAUSE_S)


def as_names(value, argument: str, hint: str) -> list[str]:
    """One name or a list of names -> a list of names."""
    names = [value] if isinstance(value, (str, Path)) else value
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, (str, Path)) for name in names):
        raise ValueError(f"{argument} is {start_of(value)}; it must be a text, or a list of at least one. {hint}")
    return [str(name) for name in names]


def make_cars(num_cars: int, track_id, config: dict, bridge_url, start: str, first_car: int = 0):
    """The backend for N cars: embedded, or on one or several bridges if a URL is given. All checks of what the user gave."""
    if isinstance(num_cars, bool) or not isinstance(num_cars, (int, np.integer)) or num_cars < 1:
        raise ValueError(f"num_envs is {num_cars!r}; it must be a whole number, 1 or more")
    if start not in STARTS:
        raise ValueError(f"unknown start {start!r}. Available: {', '.join(STARTS)}")
    track_ids = as_names(track_id, "track_id", f"Available: {', '.join(TRACKS)}")
    if bridge_url is None:
        return EmbeddedCars(int(num_cars), track_ids, config, start, first_car)
    urls = as_names(bridge_url, "bridge_url", "Leave it out to drive on the embedded engine")
    if start != "grid":
        raise ValueError(f"start is {start!r}, but the real game always starts on the grid; leave it out with a bridge")
    for track in track_ids:
        if track.lower().endswith(".json"):
            own = f"its own tracks, e.g. {', '.join(TRACKS)}"
            raise ValueError(f"track {track!r} is a file, but the real game has only {own}")
    return BridgeCars(int(num_cars), track_ids, config, urls, first_car)


class Patience:
    """For how many ticks every car has got no farther along the track. Cars that have for `limit` ticks are to be put back."""

    STATE = ("arc", "travelled", "farthest", "waiting")

    def __init__(self, num_cars: int, limit: int):
        if not isinstance(limit, (int, np.integer)) or isinstance(limit, bool) or limit < 0:
            raise ValueError(f"patience is {limit!r}; it must be a number of ticks, or 0 for no end of it")
        self.limit = limit
        self.arc, self.travelled, self.farthest = (np.zeros(num_cars) for _ in range(3))  # in laps
        self.waiting = np.zeros(num_cars, np.int64)

    def begin(self, cars, observations) -> None:
        """New episodes of these cars, which are where the observations say."""
        self.arc[cars], self.travelled[cars], self.farthest[cars], self.waiting[cars] = observations[:, 12], 0, 0, 0

    def at_end(self, observations) -> np.ndarray:
        """After a tick: which cars are to be put back (N,)."""
        if not self.limit:
            return np.zeros(len(self.waiting), bool)
        gain = observations[:, 12] - self.arc
        self.arc, self.travelled = observations[:, 12].astype(float), self.travelled + gain - np.rint(gain)
        self.waiting = np.where(self.travelled > self.farthest, 0, self.waiting + 1)
        self.farthest = np.maximum(self.farthest, self.travelled)
        return self.waiting >= self.limit


# == 3  RacerEnv =======================================================================================================


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

    ## Reward: the sum of six parts, weighted by the config file (`ai-config.json`, section "weights")

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
    track, off the middle, not quite straight, at some speed; seeded by reset(seed=...). Only a whole lap from line to line
    counts as a lap, wherever the car began.

    terminated: slower than stillnessSpeedThreshold for stillnessTimeoutTicks in a row (180). truncated: maxSteps (3000).
    A finished lap or a crash ends nothing. With `patience`, an episode is also truncated when the car has got no farther along
    the track for so many ticks: it stands, or drives back.

    ## Info

    After a step the game's keys: the six parts by name, `tick rawSpeed lap checkpoint stepCount wallContact
    stillnessCounter`; after a reset `lap checkpoint stepCount`. `lap` starts at 1 and grows when a lap is completed;
    `checkpoint` is the last of the 30 gates crossed; `speed` is the reward part, `rawSpeed` the speed.

    ## Arguments

    track_id     "track-01" to "track-03", "random-1" and so on, or the path of a JSON file {"name", "control_points": [[x, y,
                 half_width], ...]}
    config_path  reward weights and limits in the game's schema; default ai-config.json
    bridge_url   drive in the real game behind this URL, e.g. "ws://localhost:9876"; default: the embedded engine
    start        "grid" or "anywhere"
    patience     ticks without getting farther after which an episode is truncated; 0: never
    render_mode  None or "rgb_array": the track, the car and its trail as (H, W, 3) uint8
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": TICKS_PER_SECOND}

    def __init__(
        self,
        track_id: str = "track-01",
        config_path: str | Path | None = None,
        bridge_url: str | None = None,
        start: str = "grid",
        render_mode: str | None = None,
        patience: int = 0,
    ):
        _check_render_mode(render_mode, track_id, bridge_url)
        self.observation_space, self.action_space = make_spaces()
        self.render_mode = render_mode
        self._state = "new"  # -> "running" <-> "ended", -> "closed"
        for argument, value in (("track_id", track_id), ("bridge_url", bridge_url)):
            if isinstance(value, (list, tuple)):
                found = f"{argument} is a list: {start_of(value)}"
                raise ValueError(f"{found}; one car takes one, RacerVectorEnv takes several")
        self.config = load_config(config_path)
        self._patience = Patience(1, patience)
        self._cars = make_cars(1, track_id, self.config, bridge_url, start)
        self._camera = make_camera(self._cars, self.config) if render_mode else None
        # What gym.make would note: with it, Gymnasium's tools can make another one like this.
        self.spec = copy.deepcopy(gym.spec(ENV_ID))
        arguments = {"track_id": track_id, "config_path": config_path, "bridge_url": bridge_url, "start": start}
        self.spec.kwargs = {**arguments, "render_mode": render_mode, "patience": patience}

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        _check_open(self._state)
        super().reset(seed=seed)
        seeds = [self.np_random_seed] if seed is not None or self._state == "new" else None
        self._state = "new"
        observations, info = self._cars.reset(np.array([0]), seeds)
        self._patience.begin([0], observations)
        self._state = "running"
        if self._camera:
            self._camera.reset(np.array([0]))
        return observations[0], {key: int(value[0]) for key, value in info.items()}

    def step(self, action):
        _check_open(self._state)
        if self._state != "running":
            what = "the episode has ended" if self._state == "ended" else "the car is not on the track yet"
            raise ValueError(f"step called, but {what}: call reset() first")
        actions = check_actions(action, (3,))[None]
        observations, rewards, terminated, truncated, info = self._cars.step(actions)
        truncated = truncated | self._patience.at_end(observations)
        if terminated[0] or truncated[0]:
            self._state = "ended"
        if self._camera:
            self._camera.follow(actions)
        info = {key: kind(info[key][0]) for key, kind in STEP_INFO.items()}
        return observations[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), info

    def render(self):
        if self._camera is None:
            gym.logger.warn('nothing to render: make the environment with render_mode="rgb_array"')
            return None
        return self._camera.picture(0)

    def close(self) -> None:
        self._state = "closed"
        if hasattr(self, "_cars"):
            self._cars.close()


def _check_render_mode(render_mode, track_id, bridge_url) -> None:
    modes = RacerEnv.metadata["render_modes"]
    if render_mode is not None and render_mode not in modes:
        raise ValueError(f"unknown render_mode {render_mode!r}. Available: {', '.join(modes)}")
    if render_mode is None or bridge_url is None:
        return
    if not set(as_names(track_id, "track_id", "")) <= set(TRACKS):
        known = ", ".join(TRACKS)
        raise ValueError(f"render_mode with a bridge works on the tracks known here ({known}), not on {track_id!r}")


def _check_open(state: str) -> None:
    if state == "closed":
        raise ValueError("this environment is closed; make a new one")


def difference_from_twin(track_id: str, config_path, bridge_url: str) -> str | None:
    """Drive the same in the game and on the embedded engine, into a wall too. -> the first difference, None if there is none"""
    if track_id not in TRACKS:
        return f"{track_id} is not known here"
    twin = RacerEnv(track_id, config_path)
    with contextlib.closing(RacerEnv(track_id, config_path, bridge_url)) as game:
        for tick in range(TWIN_TICKS + 1):
            inputs = [0.3 * math.sin(tick / 5), 1.0, 0.0]  # about straight on, and then along the wall
            both = []
            for env in (game, twin):
                obs, *rest, info = env.step(inputs) if tick else env.reset()
                both.append({**dict(zip(OBS_NAMES, obs, strict=True)), **info})
                both[-1] |= dict(zip(("reward", "terminated", "truncated"), rest, strict=False))
            a, b = both
            for name in a:
                if not abs(float(a[name]) - float(b[name])) <= TWIN_TOLERANCE:
                    return f"{name} on {track_id} is {a[name]:g} after {tick} ticks, {b[name]:g} on the embedded engine"
            if b.get("terminated") or b.get("truncated"):  # limits shorter than this
                break
    return None


# == 4  RacerVectorEnv =================================================================================================


class RacerVectorEnv(gym.vector.VectorEnv):
    """N cars at once, each as in RacerEnv. Embedded: one batched engine. Bridge: N connections, whose
    requests are all sent before any reply is read.

    Same-step autoreset: when an episode ends, step returns the first observation of the next one, and
    infos["final_obs"], infos["final_info"] with their masks `_final_obs`, `_final_info` hold the end of the last, as in
    Gymnasium's own vector environments. infos["episode"] = {"r" return, "l" length, "t" seconds} with mask `_episode`
    comes along (episode_statistics=False leaves it out, for gymnasium.wrappers.vector.RecordEpisodeStatistics).

    Arguments as in RacerEnv, and
        num_envs     number of cars
        track_id     one track, or several: car i drives track_id[i % len(track_id)]
        bridge_url   one URL, or several: car i connects to bridge_url[i % len(bridge_url)]
        retries      connect again after a fault of the bridge, up to so many times in a row (0: raise BridgeError)
        stagger      cut the first episodes short (truncated), each at another time, so that with many cars not all episodes
                     end in the same tick
        off_road_price   multiplies the config's offTrackPenalty: with more than 1, drivers learn to be careful
        first_car    for a fleet that several processes share: car i of this environment is car first_car + i of the fleet,
                     which decides its track and its seed
    reset(seed=s) seeds car i with s + i.

    After a fault with retries left, all cars begin new episodes. The old ones end as truncated, with the last observation
    that came from the game: if the fault was in a step, this step moved nobody and its reward is 0. `bridge_faults`
    counts the faults.
    infos["episode"]["cut"] marks the episodes that ended before their time, by a fault or by `stagger`, "put_back" those that
    `patience` ended.
    """

    metadata = {**RacerEnv.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
    OWN_STATE = ("returns", "lengths", "limits")

    def __init__(
        self,
        num_envs: int = 64,
        track_id: str | Sequence[str] = "track-01",
        config_path: str | Path | None = None,
        bridge_url: str | Sequence[str] | None = None,
        start: str = "grid",
        render_mode: str | None = None,
        episode_statistics: bool = True,
        retries: int = 0,
        stagger: bool = False,
        first_car: int = 0,
        patience: int = 0,
        off_road_price: float = 1.0,
    ):
        _check_render_mode(render_mode, track_id, bridge_url)
        self.render_mode, self.episode_statistics = render_mode, episode_statistics
        self.starts_on_line = start == "grid"
        self.retries, self.bridge_faults, self._failures_in_a_row = retries, 0, 0
        self.first_car, self._state = first_car, "new"
        self.config = load_config(config_path)
        self.config["weights"]["offTrackPenalty"] *= off_road_price
        self._make_cars = lambda: make_cars(num_envs, track_id, self.config, bridge_url, start, first_car)
        self._cars = self._make_cars()
        self.num_envs, self._patience = int(num_envs), Patience(num_envs, patience)
        self.single_observation_space, self.single_action_space = make_spaces()
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, self.num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, self.num_envs)
        self._camera = make_camera(self._cars, self.config) if render_mode else None
        self._all_cars = np.ones(self.num_envs, bool)
        self._returns, self._lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64)
        self._limits, self._started_s = np.full(self.num_envs, NO_LIMIT), np.zeros(self.num_envs)
        if stagger:
            places = np.arange(self.num_envs) * STAGGER_STRIDE % self.num_envs
            self._limits = np.ceil((places + 1) / self.num_envs * self.config["episode"]["maxSteps"]).astype(np.int64)

    @property
    def observations(self) -> np.ndarray:
        """The current observations (N, 14), also after set_state."""
        return self._observations.copy()

    @property
    def track_lengths(self) -> np.ndarray:
        """Of every car's track (N,), in units. 1 for a track that only the real game knows."""
        embedded = isinstance(self._cars, EmbeddedCars)
        return np.array([load_track(t).length if embedded or t in TRACKS else 1.0 for t in self._cars.track_ids])

    # -- state in, state out: what an exact resume needs -----------------------------------------------------------------

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything the next step depends on, as plain arrays. Empty on a bridge: the game does not expose its state."""
        if not isinstance(self._cars, EmbeddedCars):
            return {}
        own = {name: getattr(self, f"_{name}").copy() for name in self.OWN_STATE}
        own |= {name: getattr(self._patience, name).copy() for name in Patience.STATE}
        return {**self._cars.sim.get_state(), **own}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from get_state(), bit for bit."""
        _check_open(self._state)
        if not isinstance(self._cars, EmbeddedCars):
            raise ValueError("the real game cannot be put into a state; only the embedded engine can")
        for name in self.OWN_STATE:
            value, own = np.asarray(state.get(name)), getattr(self, f"_{name}")
            if value.shape != own.shape or value.dtype != own.dtype:
                raise ValueError(
                    f"environment state {name!r} is {value.dtype} {value.shape}, expected {own.dtype} {own.shape}"
                )
        self._cars.sim.set_state(state)
        for name in self.OWN_STATE:
            setattr(self, f"_{name}", np.array(state[name]))
        for name in set(Patience.STATE) & set(state):
            setattr(self._patience, name, np.array(state[name]))
        self._started_s = np.full(self.num_envs, time.perf_counter())
        self._state = "running"
        self._observations = self._cars.sim.observe().astype(np.float32)
        if self._camera:
            self._camera.reset(np.arange(self.num_envs))

    # -- the Gymnasium interface ---------------------------------------------------------------------------------------

    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: dict | None = None):
        _check_open(self._state)
        seeds, everyone = self._seeds(seed), np.arange(self.num_envs)
        self._state = "new"
        try:
            self._observations, self._progress = self._cars.reset(everyone, seeds)
        except BridgeError as error:
            self._observations, self._progress = self._reconnect(error)
        self._state = "running"
        self._begin_episodes(everyone, self._observations)
        return self._observations.copy(), _with_masks(self._progress, self._all_cars)

    def _seeds(self, seed) -> list[int | None] | None:
        """One seed per car, None to go on with the random numbers as they are (fresh ones on the first reset)."""
        if seed is None and self._state == "new":
            seed = int(np.random.SeedSequence().generate_state(1)[0])
        if seed is None:
            return None
        if isinstance(seed, (int, np.integer)) and seed >= 0:
            super().reset(seed=int(seed))
            return [int(seed) + self.first_car + i for i in range(self.num_envs)]
        fits = isinstance(seed, Sequence) and len(seed) == self.num_envs
        if not fits or any(s is not None and (not isinstance(s, int) or s < 0) for s in seed):
            needed = f"0 or more, or a list of {self.num_envs}, None for any"
            raise ValueError(f"seed is {start_of(seed)}; it must be {needed}")
        anew = self._state == "new"
        fresh = np.random.SeedSequence().generate_state(self.num_envs) if anew else [None] * self.num_envs
        return [other if s is None else s for s, other in zip(seed, fresh, strict=True)]

    def step(self, actions):
        _check_open(self._state)
        if self._state != "running":
            raise ValueError("step called, but the cars are not on the track yet: call reset() first")
        actions = check_actions(actions, (self.num_envs, 3))
        first = None  # observations and info of the episodes that begin in this step
        try:
            observations, rewards, terminated, truncated, info = self._cars.step(actions)
        except BridgeError as error:
            first = self._reconnect(error)
            observations, rewards, terminated, truncated, info = self._stand_still()
            cut, put_back = self._all_cars, ~self._all_cars
        else:
            self._failures_in_a_row = 0
            self._returns += rewards
            self._lengths += 1
            cut = self._lengths >= self._limits
            put_back = self._patience.at_end(observations) & ~(terminated | truncated | cut)
            if self._camera:
                self._camera.follow(actions)
        done = terminated | truncated | cut | put_back
        if done.any() and first is None:
            try:
                first = self._cars.reset(np.flatnonzero(done))
            except BridgeError as error:
                first = self._reconnect(error)
                done, cut = self._all_cars, cut | ~done
        self._progress = {key: info[key] for key in RESET_INFO}
        if first is None:
            infos = _with_masks(info, self._all_cars)
        else:
            observations, infos = self._end_episodes(done, cut, put_back, observations, info, *first)
        self._observations = observations
        return observations.copy(), rewards, terminated, truncated | (done & ~terminated), infos

    def _stand_still(self):
        """A step in which nothing happens: observations, rewards, terminated, truncated, info."""
        info = {key: np.zeros(self.num_envs, kind) for key, kind in STEP_INFO.items()} | self._progress
        nobody = np.zeros(self.num_envs, bool)
        return self._observations, np.zeros(self.num_envs), nobody, nobody, info

    def _reconnect(self, error: BridgeError):
        """New connections, and new episodes on all of them. -> observations, info. Raises the error if no retry is left.

        Set `retries` to 0 to stop waiting, for example in the handler of a signal.
        """
        self.bridge_faults += 1
        while self._failures_in_a_row < self.retries:
            until = time.monotonic() + retry_pause_s(self._failures_in_a_row)
            self._failures_in_a_row += 1
            logger.warning(f"{error}\nConnecting again (retry {self._failures_in_a_row} of {self.retries})")
            while self.retries and time.monotonic() < until:
                time.sleep(0.05)
            try:
                self._cars.close()
                self._cars = self._make_cars()
                return self._cars.reset(np.arange(self.num_envs))
            except BridgeError as again:
                error = again
        raise error

    def _end_episodes(self, done, cut, put_back, observations, info, first_observations, first_info):
        """Same-step autoreset of the cars that are done. -> observations and infos as SyncVectorEnv gives them"""
        final_obs = np.full(self.num_envs, None, dtype=object)
        for i in np.flatnonzero(done):
            final_obs[i] = observations[i].copy()
        final_info = {key: np.where(done, value, value.dtype.type(0)) for key, value in info.items()}
        infos = {"final_obs": final_obs, "_final_obs": done.copy()}
        infos |= {"final_info": _with_masks(final_info, done), "_final_info": done.copy()}
        if self.episode_statistics:
            elapsed = time.perf_counter() - self._started_s
            totals = {"r": self._returns, "l": self._lengths, "t": elapsed}
            infos["episode"] = {key: np.where(done, value, value.dtype.type(0)) for key, value in totals.items()}
            if cut.any():
                infos["episode"]["cut"] = cut & ~put_back & (self._lengths < self.config["episode"]["maxSteps"])
            if put_back.any():
                infos["episode"]["put_back"] = put_back
            infos["_episode"] = done & (self._lengths > 0)
        cars = np.flatnonzero(done)
        # A car that was put back keeps its time for the first cut, or all cars would be on the grid together, and then no more.
        rest = np.where(put_back & (self._limits < NO_LIMIT), self._limits - self._lengths, NO_LIMIT)
        self._limits[cars] = rest[cars]
        self._begin_episodes(cars, first_observations)
        observations = observations.copy()
        observations[cars] = first_observations
        for key, value in info.items():
            if key in first_info:
                value = value.copy()
                value[cars] = first_info[key]
                infos[key], infos[f"_{key}"] = value, self._all_cars.copy()
                self._progress[key] = value
            elif not done.all():
                infos[key], infos[f"_{key}"] = np.where(done, value.dtype.type(0), value), ~done
        return observations, infos

    def _begin_episodes(self, cars, observations) -> None:
        self._patience.begin(cars, observations)
        self._returns[cars], self._lengths[cars], self._started_s[cars] = 0.0, 0, time.perf_counter()
        if self._camera:
            self._camera.reset(cars)

    def render(self):
        if self._camera is None:
            gym.logger.warn('nothing to render: make the environment with render_mode="rgb_array"')
            return None
        return tuple(self._camera.picture(i) for i in range(self.num_envs))

    def places(self, car: int, last_episode: bool = False) -> np.ndarray:
        """Where a car was in this episode, or in the last whole one (ticks + 1, 7): see racer_view.Camera. Needs a render_mode."""
        return np.array((self._camera.last_episode if last_episode else self._camera.places)[car])

    @property
    def off_road(self) -> np.ndarray:
        """Which cars left the road in the last tick (N,), also where it ended an episode."""
        return self._cars.off_road

    def close_extras(self, **_) -> None:
        self._state = "closed"
        if hasattr(self, "_cars"):
            self._cars.close()


def _with_masks(info: dict[str, np.ndarray], mask: np.ndarray) -> dict:
    """Gymnasium's form of vector infos: every key with a mask that says which cars have it."""
    infos = {}
    for key, value in info.items():
        infos[key], infos[f"_{key}"] = value, mask.copy()
    return infos


def make_camera(cars, config: dict):
    """For render(): it watches the embedded cars, or embedded twins of cars on a bridge."""
    from racer.view.pictures import Camera

    if isinstance(cars, BridgeCars):
        return Camera(RacerSim(len(cars.track_ids), cars.track_ids, config), is_twin=True)
    return Camera(cars.sim, is_twin=False)


# == 5  RewardScaler ===================================================================================================


class RewardScaler:
    """The scale of rewards for learning: a unit of progress pays the same on every track, and returns are of order 1.

    Rewards are multiplied by the track's length (a lap pays 1 on any track; penalties grow too), then divided by the standard
    deviation of the discounted returns so far. Only what the networks learn from is scaled; metrics show raw rewards.
    """

    def __init__(self, gamma: float, track_lengths: np.ndarray):
        self.gamma, self.track_lengths = gamma, track_lengths  # (N,)
        self.returns = np.zeros(len(track_lengths))  # (N,) discounted sums of each car's rewards so far
        self.moments = (0.0, 1.0, 1e-4)  # mean, variance and count of all returns there have been

    def update(self, rewards, done, gather=lambda value: [value]) -> None:
        """Take in rewards and ends (T, N) of these cars, and through `gather` the statistics of those of other processes."""
        returns = np.empty_like(rewards)
        for t in range(len(rewards)):
            returns[t] = self.returns = self.returns * self.gamma + rewards[t] * self.track_lengths
            self.returns = np.where(done[t], 0.0, self.returns)
        for moments in gather((float(returns.mean()), float(returns.var()), returns.size)):
            self.moments = merge_moments(self.moments, moments)

    @property
    def scale(self) -> np.ndarray:
        """What to multiply every car's rewards by (N,)."""
        return self.track_lengths / math.sqrt(self.moments[1] + 1e-8)

    def begin_anew(self) -> None:
        """All cars begin new episodes, though no step has ended the old ones."""
        self.returns = np.zeros_like(self.returns)

    def get_state(self) -> dict:
        return {"returns": self.returns, "moments": np.array(self.moments)}

    def set_state(self, state: dict) -> None:
        self.moments = tuple(state["moments"].tolist())
        if len(state["returns"]) == len(self.returns):  # otherwise other processes drove these cars
            self.returns = np.array(state["returns"])


def merge_moments(a, b):
    """Mean, variance and count of two sets taken together (Chan et al.)."""
    (mean_a, var_a, count_a), (mean_b, var_b, count_b) = a, b
    count, delta = count_a + count_b, mean_b - mean_a
    var = (var_a * count_a + var_b * count_b + delta * delta * (count_a * count_b / count)) / count
    return mean_a + delta * (count_b / count), var, count


gym.register(id=ENV_ID, entry_point="racer_env:RacerEnv", vector_entry_point="racer_env:RacerVectorEnv")
