"""The logger's semantics, and what is said in a terminal."""

from __future__ import annotations

import csv
import errno
import io
import pickle
import sys
import warnings

import pytest
from conftest import Failing

from callbacks_lite import MetricsLogger, check_wandb, read_csv
from racer.training.terminal import ProgressLine, print_safely


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def logger(tmp_path):
    made = MetricsLogger(tmp_path, tensorboard=False)
    yield made
    made.close()


# -- the logger --------------------------------------------------------------------------------------------------------


def test_a_dump_writes_the_last_values_at_once_and_survives_a_late_column(logger, tmp_path):
    for value in (1, 2, 6):
        logger.record("a", value)
    assert logger.dump(10) == {"a": 6.0}
    assert rows(tmp_path) == [{"step": "10", "a": "6.0"}], "nothing was closed or flushed by hand"
    logger.record("b", 3)
    assert logger.dump(20) == {"b": 3.0}, "a dump starts afresh"
    logger.record("a", 4)
    logger.dump(30)
    assert rows(tmp_path) == [
        {"step": "10", "a": "6.0", "b": ""},
        {"step": "20", "a": "", "b": "3.0"},
        {"step": "30", "a": "4.0", "b": ""},
    ]


def test_resume_takes_back_what_came_after_the_checkpoint_and_a_torn_line(tmp_path):
    first = MetricsLogger(tmp_path, tensorboard=False)
    for step in (10, 20, 30):
        first.record("a", step)
        first.dump(step)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("40,4")  # killed while writing
    again = MetricsLogger(tmp_path, resume_step=20, tensorboard=False)
    again.record("a", 99)
    again.dump(30)
    assert [(r["step"], r["a"]) for r in rows(tmp_path)] == [("10", "10.0"), ("20", "20.0"), ("30", "99.0")]


def test_a_torn_line_is_left_out_on_reading(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,a\n1,2\n2,")
    assert read_csv(path) == [{"step": "1", "a": "2"}]
    assert read_csv(tmp_path / "none.csv") == []


@pytest.mark.parametrize("what", ["no package", "full for TensorBoard", "full for the file"])
def test_what_cannot_be_written_costs_one_warning(tmp_path, monkeypatch, what):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if what == "no package":
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.warns(
        UserWarning, match="cannot write TensorBoard" if "file" not in what else r"cannot write metrics\.csv"
    ) as caught:
        logger = MetricsLogger(tmp_path, tensorboard="file" not in what)
        if what == "full for TensorBoard":
            logger._writer.add_scalar = full
        if what == "full for the file":
            monkeypatch.setattr(type(logger.csv_path), "open", full)
        for step in range(3):
            logger.record("a", 1)
            logger.dump(step)
    monkeypatch.undo()
    logger.close()
    assert len(caught) == 1 and len(rows(tmp_path)) == (0 if "file" in what else 3)


@pytest.mark.slow
def test_weights_and_biases_gets_what_tensorboard_gets(tmp_path, monkeypatch):
    """Offline: what would be sent is written beside the run."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        logger = MetricsLogger(tmp_path / "run", wandb="racer", settings={"gamma": 0.98})
        logger.record("train/loss", 0.25)
        logger.dump(100)
        logger.close()
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert b"train/loss" in written.read_bytes() and b"gamma" in written.read_bytes()


def test_wandb_without_its_package_or_without_tensorboard_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install wandb"):
        check_wandb(tensorboard=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ValueError, match="--no-tensorboard"):
        check_wandb(tensorboard=False)


# -- the terminal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["stdout", "stderr"])
def test_what_cannot_be_said_ends_nothing(monkeypatch, to):
    for error in (
        BrokenPipeError(),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EIO, "no terminal"),
    ):
        monkeypatch.setattr(sys, to, Failing(error))
        print_safely("hello", to=to)
        print_safely("and again", to=to)
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, to, stream)
        print_safely("hello", to=to)


def test_progress_without_a_terminal_and_past_the_end(monkeypatch, capsys):
    ProgressLine(1000, 0).show(1024, "")
    assert " 100% " in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdout", None)
    ProgressLine(1000, 0).show(1024, "")


def test_rows_are_not_kept_in_memory(logger, tmp_path):
    for step in range(1000):
        logger.record("a", step)
        logger.dump(step)
    logger.record("b", 1)
    logger.dump(1000)
    assert len(rows(tmp_path)) == 1001 and len(pickle.dumps(vars(logger))) < 2000
