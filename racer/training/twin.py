"""Does the game behind a bridge drive like the embedded engine? If so, evaluations cost no game time."""

from __future__ import annotations

import contextlib
import math

from racer.game.observations import OBS_NAMES
from racer.game.sim import ARC_TOLERANCE
from racer.game.tracks import TRACKS
from racer_env import RacerEnv

TICKS = 240


def difference_from_engine(track_id: str, config_path, bridge_url: str) -> str | None:
    """Drive the same in the game and on the embedded engine, also into a wall. -> the first difference, None if there is none"""
    if track_id not in TRACKS:
        return f"{track_id} is not known here"
    engine = RacerEnv(track_id, config_path)
    weight = max(1.0, abs(engine.config["weights"]["progress"]))
    with contextlib.closing(RacerEnv(track_id, config_path, bridge_url)) as game:
        for tick in range(TICKS + 1):
            action = [0.3 * math.sin(tick / 5), 1.0, 0.0]  # about straight on, and then along the wall
            both = []
            for env in (game, engine):
                obs, *rest, info = env.step(action) if tick else env.reset()
                both.append({**dict(zip(OBS_NAMES, obs, strict=True)), **info})
                both[-1] |= dict(zip(("reward", "terminated", "truncated"), rest, strict=False))
            a, b = both
            for name in a:
                tolerance = ARC_TOLERANCE * (weight if name in ("progress", "reward") else 1.0)
                if not abs(float(a[name]) - float(b[name])) <= tolerance:
                    return f"{name} on {track_id} is {a[name]:g} after {tick} ticks, {b[name]:g} on the embedded engine"
            if b.get("terminated") or b.get("truncated"):  # short episodes
                break
    return None
