"""Every number of the game, with its unit. Start here to learn the game, then read track.py and sim.py.

Lengths are game units, angles radians (counter-clockwise positive), times seconds, speeds units per second.
"""

from __future__ import annotations

import math

import numpy as np

TICKS_PER_SECOND = 60
DT_S = 1.0 / TICKS_PER_SECOND

# -- actions
ACTION_NAMES = ("steer", "throttle", "brake")
ACTION_LOW = np.array([-1.0, 0.0, 0.0], dtype=np.float32)
ACTION_HIGH = np.array([1.0, 1.0, 1.0], dtype=np.float32)

# -- car
MASS = 800.0
MAX_SPEED = 160.0
ENGINE_FORCE = 55_000.0
BRAKE_FORCE = 50_000.0
DRAG = 2.0
ROLLING_RESISTANCE = 150.0
WHEELBASE = 1.5
MAX_STEER_ANGLE = 0.37
STEER_FADE = 0.025  # the steer angle is divided by 1 + STEER_FADE * speed
INPUT_RATES = (24.0, 6.0, 10.0)  # per second: how fast steer, throttle and brake approach their targets
STEER_SHARE, THROTTLE_SHARE, BRAKE_SHARE = (1.0 - math.exp(-rate * DT_S) for rate in INPUT_RATES)
SLIDE_GRIP = 0.85  # share of the sideways speed removed per tick on the road,
SLIDE_GRIP_LOSS = 0.30  # and how much this share shrinks toward top speed
DRIVING_SPEED = 1.0  # above: bicycle steering and full resistance
RESTING_SPEED = 0.01  # at or below: no resistance

# -- surfaces: road, shoulder, runoff
GRIP = np.array([1.0, 0.7, 0.5])
SURFACE_SPEED = np.array([1.0, 0.85, 0.4])
SHOULDER_WIDTH = 24.0
RUNOFF_WIDTH = 30.0  # distance from the edge of the road to the wall

# -- walls
CAR_RADIUS = 1.0
WALL_TOUCH = 2.0  # a wall closer than this counts as wall contact in the reward
SWEEP_STEP = 0.75  # longer moves are tested for collisions at points at most this far apart
MAX_SWEEP = math.ceil(MAX_SPEED * DT_S / SWEEP_STEP)
SLIDE_KEEP, BOUNCE = 0.7, 0.08
PUSH_SLIDE, PUSH_REST = 0.8, 0.5
HARD_IMPACT, IMPACT_TURN, IMPACT_YAW_LOSS = 0.5, 0.4, 0.5

# -- track
CHORDS = 20  # chords per spline segment that define arc length
GATES = 30
MIN_OFFSET = 4.0  # minimum distance between a wall and the centreline, before smoothing

# -- sensors
RAY_ANGLES = np.radians(22.5) * np.arange(-4, 5)
NUM_RAYS = len(RAY_ANGLES)
RAY_RANGE = 200.0
MAX_YAW_RATE = 5.0
CENTRELINE_RANGE = 80.0

# -- rewards and limits: the schema of the config file, with the game's defaults
REWARD_PARTS = ("progress", "speed", "wall", "offTrack", "backward", "stillness")
DEFAULT_CONFIG = {
    "weights": {
        "progress": 1.0,
        "speedBonus": 0.0,
        "wallPenalty": -0.002,
        "offTrackPenalty": -0.001,
        "backwardPenalty": 0.0,
        "stillnessPenalty": -0.001,
        "stillnessSpeedThreshold": 2.0,
    },
    "episode": {"maxSteps": 3000, "stillnessTimeoutTicks": 180},
}

# -- what the game's `info` holds after a step, with its type, in the game's order
GAME_INFO: dict[str, type] = {
    **dict.fromkeys(REWARD_PARTS, float),
    "tick": int,
    "rawSpeed": float,
    "lap": int,
    "checkpoint": int,
    "stepCount": int,
    "wallContact": bool,
    "stillnessCounter": int,
}
RESET_INFO = ("lap", "checkpoint", "stepCount")  # and after a reset
STEP_INFO = {**GAME_INFO, "lapTicks": int}  # what ours holds: also how long the lap took that this step completed, or 0

# -- start "anywhere" (not in the game): how far from the ideal line a car may begin
ANYWHERE_LATERAL = 0.7  # share of the road's half-width
ANYWHERE_HEADING = 0.4  # radians to either side of the tangent
ANYWHERE_SPEED = 80.0  # units/s at most
STARTS = ("grid", "anywhere")
