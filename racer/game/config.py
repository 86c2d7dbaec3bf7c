"""The config file: reward weights and episode limits in the game's own schema, read and checked."""

from __future__ import annotations

import copy
import difflib
import json
from pathlib import Path

from racer.game.checks import UserError, excerpt, is_finite, read_json
from racer.game.rules import DEFAULT_CONFIG

DEFAULT_CONFIG_PATH = Path(__file__).resolve().parents[2] / "ai-config.json"


def load_config(config_path: str | Path | dict | None = None) -> dict:
    """The config file as a complete, checked dict; or a dict as such a file holds it. None: ai-config.json of this project.

    Missing keys are refused, not filled in: the game accepts such a config and then sends rewards that are not numbers.
    """
    if config_path is not None and not isinstance(config_path, (str, Path, dict)):
        raise UserError(f"config_path is {excerpt(config_path)}; it must be the path of a JSON file")
    if isinstance(config_path, dict):
        path, config = "(a dict)", copy.deepcopy(config_path)
    else:
        path = Path(config_path or DEFAULT_CONFIG_PATH)
        if path == DEFAULT_CONFIG_PATH and not path.exists():  # installed with pip, which takes Python files only
            return copy.deepcopy(DEFAULT_CONFIG)
        config = read_json(path, "config file")
    _check_keys(config, DEFAULT_CONFIG, f"config file {path}", "")
    for section, defaults in DEFAULT_CONFIG.items():
        _check_keys(config[section], defaults, f"config file {path}", f"{section}.")
        for key, value in config[section].items():
            wanted = "a whole number of ticks, 1 or more" if section == "episode" else "a finite number"
            fits = is_finite(value) and (section != "episode" or (isinstance(value, int) and value >= 1))
            if key == "stillnessSpeedThreshold":
                wanted, fits = "a speed, 0 or more", fits and value >= 0
            if not fits:
                found = f"config file {path}: {section}.{key} is {excerpt(repr(value))}"
                raise UserError(f"{found}; it must be {wanted}, e.g. {defaults[key]}")
    return config


def _check_keys(found, expected: dict, source: str, prefix: str) -> None:
    keys = ", ".join(expected)
    if not isinstance(found, dict):
        what = f"{prefix[:-1]} is" if prefix else "it is"
        raise UserError(f"{source}: {what} {excerpt(found)}; it must be an object with the keys {keys}")
    for key in sorted(set(found) - set(expected)):
        near = difflib.get_close_matches(key, expected, n=1)
        hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {keys}"
        raise UserError(f"{source}: unknown key {prefix}{key}; {hint}")
    for key in expected:
        if key not in found:
            example = json.dumps(expected[key])
            raise UserError(f"{source}: {prefix}{key} is missing; the game needs the complete config, e.g. {example}")
