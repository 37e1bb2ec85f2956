"""Options: defaults, values, refusals, environment, tables."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fxpipe import log
from fxpipe.errors import OptionError, ScheduleError
from fxpipe.options import (
    ENVIRONMENT,
    Options,
    environment_table,
    log_level,
    options_table,
)
from fxpipe.schedule import Schedule


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ENVIRONMENT:
        monkeypatch.delenv(variable.name, raising=False)


def test_nothing_given_gives_the_defaults() -> None:
    options = Options.parse(None)
    assert options == Options.parse({}) == Options()
    assert (options.stages, options.microbatches, options.schedule) == (None, 1, "1f1b")
    assert (options.lowering, options.check, options.timeout) == ("inductor", False, 60.0)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("stages", 3, 3),
        ("stages", "auto", "auto"),
        ("stages", ["blocks.1", "head"], ("blocks.1", "head")),
        ("stages", None, None),
        ("microbatches", 8, 8),
        ("schedule", "chimera:f=2", "chimera:f=2"),
        ("schedule", "0F0 0B0", Schedule.parse("0F0 0B0")),
        ("schedule", "0F0 0B0\n1F0 1B0", Schedule.parse("0F0 0B0\n1F0 1B0")),
        ("schedule", Schedule.parse("0F0"), Schedule.parse("0F0")),
        ("lowering", "eager", "eager"),
        ("passes", {"split_weight_grads": False}, {"split_weight_grads": False}),
        ("dump", Path("a") / "b", str(Path("a") / "b")),
        ("loss", 0, 0),
        ("loss", "loss", "loss"),
        ("loss_reduction", "sum", "sum"),
        ("batch_dims", {"batch.x": 1, "mask": None}, {"batch.x": 1, "mask": None}),
        ("batchnorm", "defer", "defer"),
        ("timeout", 5, 5),
        ("memory_limit", 2.5, 2.5),
    ],
)
def test_value_is_read(name: str, value: Any, read: Any) -> None:
    assert getattr(Options.parse({name: value}), name) == read


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stages", True),
        ("stages", 0),
        ("stages", 2.0),
        ("stages", []),
        ("stages", ["a", "a"]),
        ("stages", ["a", ""]),
        ("microbatches", None),
        ("microbatches", "4"),
        ("schedule", ""),
        ("schedule", 1),
        ("ranks", -1),
        ("lowering", ["eager"]),
        ("passes", {"normalize": 0}),
        ("passes", ["normalize"]),
        ("dump", ""),
        ("check", 1),
        ("loss", -1),
        ("loss", False),
        ("loss_reduction", "none"),
        ("batch_dims", {"x": -1}),
        ("batch_dims", {"x": True}),
        ("batch_dims", {0: 0}),
        ("timeout", 0),
        ("timeout", float("nan")),
        ("timeout", float("inf")),
        ("memory_limit", "16"),
    ],
)
def test_wrong_value_is_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"option '{name}' is .*, expected .*; (write|did)"):
        Options.parse({name: value})


def test_refusal_says_what_was_found_expected_and_what_to_change() -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse({"microbatches": "4"})
    assert str(caught.value) == (
        "option 'microbatches' is '4' (str), expected a whole number of at least 1; "
        "write for instance options={'microbatches': 4}"
    )


def test_no_stage_at_all_is_told_the_least_number() -> None:
    with pytest.raises(
        OptionError, match=r"'stages' is 0 .int., expected .* of at least 1, a list"
    ):
        Options.parse({"stages": 0})


@pytest.mark.parametrize("name", [entry.name for entry in dataclasses.fields(Options)])
def test_example_of_a_refusal_is_accepted(name: str) -> None:
    about = Options.__dataclass_fields__[name].metadata
    Options.parse({name: about["example"]})


@pytest.mark.parametrize(
    ("name", "near"),
    [("microbatch", "microbatches"), ("Stages", "stages"), ("shedule", "schedule")],
)
def test_unknown_name_gets_the_nearest(name: str, near: str) -> None:
    with pytest.raises(OptionError, match=f"option '{name}' is unknown.*did you mean '{near}'"):
        Options.parse({name: 2})


def test_unknown_name_far_from_all_gets_the_list() -> None:
    with pytest.raises(OptionError, match="expected one of stages, microbatches, .*; remove it"):
        Options.parse({"zzz": 2})


def test_misspelt_word_gets_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean 'inductor'"):
        Options.parse({"lowering": "inductr"})


def test_malformed_schedule_text_is_refused_at_once() -> None:
    with pytest.raises(ScheduleError, match="'0X0' is no action"):
        Options.parse({"schedule": "0F0 0X0"})


def test_options_that_are_no_dict_are_refused() -> None:
    with pytest.raises(OptionError, match="options is a list, expected a dict"):
        Options.parse([("stages", 2)])  # type: ignore[arg-type]


def test_later_change_of_the_dict_changes_nothing() -> None:
    dims: dict[str, int | None] = {"x": 0}
    options = Options.parse({"batch_dims": dims})
    dims["x"] = None
    assert options.batch_dims == {"x": 0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.stages = 3  # type: ignore[misc]


def test_options_survive_pickle() -> None:
    options = Options.parse({"stages": ["a"], "passes": {"normalize": False}})
    assert pickle.loads(pickle.dumps(options)) == options


def test_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPIPE_DUMP", "dumps")
    monkeypatch.setenv("FXPIPE_CHECK", "1")
    monkeypatch.setenv("FXPIPE_STOP_AFTER", "normalize")
    options = Options.parse({})
    assert (options.dump, options.check, options.stop_after) == ("dumps", True, "normalize")


def test_a_variable_stands_in_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script passes it on whose own --dump was not given."""
    monkeypatch.setenv("FXPIPE_DUMP", "dumps")
    parsed = Options.parse({"dump": None, "stop_after": None})
    assert (parsed.dump, parsed.stop_after) == ("dumps", None)


def test_options_win_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPIPE_DUMP", "from-environment")
    monkeypatch.setenv("FXPIPE_CHECK", "on")
    options = Options.parse({"dump": "given", "check": False})
    assert (options.dump, options.check) == ("given", False)


def test_empty_variable_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPIPE_DUMP", "")
    monkeypatch.setenv("FXPIPE_CHECK", " ")
    monkeypatch.setenv("FXPIPE_LOG", "")
    assert Options.parse({}) == Options()
    assert log_level() is None


def test_wrong_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPIPE_CHECK", "maybe")
    with pytest.raises(OptionError, match="FXPIPE_CHECK=maybe is unknown, expected 1, 0 or first"):
        Options.parse({})


@pytest.mark.parametrize(
    ("value", "level"),
    [("0", logging.WARNING), ("1", logging.INFO), ("2", logging.DEBUG), ("Debug", logging.DEBUG)],
)
def test_log_level_is_read(monkeypatch: pytest.MonkeyPatch, value: str, level: int) -> None:
    monkeypatch.setenv("FXPIPE_LOG", value)
    assert log_level() == level


def test_misspelt_log_level_gets_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPIPE_LOG", "debgu")
    with pytest.raises(OptionError, match="did you mean 'debug'"):
        log_level()


def test_tables_name_every_option_and_variable() -> None:
    for entry in dataclasses.fields(Options):
        assert f"\n| `{entry.name}` | `" in options_table()
    for variable in ENVIRONMENT:
        assert f"\n| `{variable.name}` | " in environment_table()


def test_tables_in_the_documentation_are_up_to_date() -> None:
    tool = Path(__file__).parent.parent / "tools" / "update_tables.py"
    done = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_library_installs_no_handler(caplog: pytest.LogCaptureFixture) -> None:
    written = log.logger("test_options")
    with caplog.at_level(logging.INFO, logger="fxpipe"):
        written.info("compiled in %d s", 3)
    assert caplog.record_tuples == [("fxpipe.test_options", logging.INFO, "compiled in 3 s")]
    assert logging.getLogger("fxpipe").handlers == []


def test_line_names_the_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    log.logger("fxpipe.test_options").warning("%d stages", 4)
    assert caplog.messages == ["rank 3: 4 stages"]


def test_same_warning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    written = log.logger("test_same_warning")
    for stage in (0, 0, 1):
        log.warn_once(written, "stage %d is empty", stage)
    assert caplog.messages == ["stage 0 is empty", "stage 1 is empty"]


def test_variable_sends_lines_to_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXPIPE_LOG", "info")
    code = "from fxpipe.log import logger; logger('a').info('seen'); logger('a').debug('unseen')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "INFO fxpipe.a: seen" in done.stderr
    assert "unseen" not in done.stderr
