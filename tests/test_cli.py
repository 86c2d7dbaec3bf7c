"""The commands as a user types them, in processes of their own; and that the files around the code say what is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ["bench_racer.py", "ppo_racer.py", "sac_racer.py"]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_reads_and_bad_flags_exit_with_2(command):
    shown = run(command, "--help")
    assert shown.returncode == 0 and command in shown.stdout
    refused = run(command, "--no-such-flag")
    assert refused.returncode == 2 and "no-such-flag" in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_value_that_makes_no_sense_is_named_without_a_traceback(command):
    refused = run(command, "--num-envs", "0")
    assert refused.returncode == 2 and "--num-envs is 0" in refused.stdout + refused.stderr
    assert "Traceback" not in refused.stderr


def test_an_unknown_track_is_an_error_not_a_traceback():
    refused = run("bench_racer.py", "--track-id", "nope")
    assert refused.returncode not in (0, 1)
    assert "unknown track 'nope'. Available: track-01" in refused.stderr and "Traceback" not in refused.stderr


def test_every_requirement_has_both_bounds_and_a_reason():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) >= 7
    for line in lines:
        assert re.fullmatch(r"[\w-]+>=[\d.]+,<[\d.]+ +# .{8,}", line), line
    assert any(line.startswith("torch>=2.3,<2.14 ") for line in lines)


def test_the_engine_needs_numpy_only():
    blocked = "import sys; sys.modules.update(dict.fromkeys(['gymnasium', 'websocket', 'torch', 'PIL', 'tyro']))\n"
    result = run("-c", blocked + "from racer_sim import RacerSim; print(RacerSim(2).reset().shape)")
    assert result.returncode == 0 and "(2, 14)" in result.stdout, result.stderr


def test_commands_in_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    for file in re.findall(r"python ((?:\w+/)?\w+\.py)", text):
        assert (ROOT / file).exists(), file
    assert re.search(r"^pip install -r requirements.txt && pytest$", text, re.M)
