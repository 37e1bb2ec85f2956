"""`torch.compile(..., options={...})` and the FXPIPE_* variables -> checked, frozen Options.

The only file that reads environment variables of ours.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from fxpipe.errors import OptionError
from fxpipe.option_forms import (
    PLACES,
    Shown,
    Unfit,
    either,
    folder,
    index,
    insertions,
    mapping,
    nothing,
    number,
    off,
    paths,
    schedule,
    switch,
    text,
    whole,
    word,
)
from fxpipe.schedule import Schedule

LOWERINGS = ("inductor", "eager", "cuda_graph")
CUDA_GRAPHS = ("step", "task")
LOSS_REDUCTIONS = ("mean", "sum")
BATCHNORMS = ("microbatch", "defer")
LOG_LEVELS = {
    "0": logging.WARNING,
    "1": logging.INFO,
    "2": logging.DEBUG,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
_SWITCH = {"1": True, "true": True, "on": True, "yes": True}
_SWITCH |= {"0": False, "false": False, "off": False, "no": False}


class Variable(NamedTuple):
    """An environment variable, and the option that it stands for (None: it has no option)."""

    name: str
    option: str | None
    meaning: str


ENVIRONMENT = (
    Variable("FXPIPE_DUMP", "dump", "folder for the text of the program after every pass"),
    Variable(
        "FXPIPE_CHECK",
        "check",
        "1: verify the program after every pass; 0: do not; first: as the option says",
    ),
    Variable("FXPIPE_STOP_AFTER", "stop_after", "name of the pass after which to stop"),
    Variable(
        "FXPIPE_LOG",
        None,
        "0 or warning: warnings; 1 or info: one line per compile; 2 or debug: every pass as well",
    ),
)


def option(
    accept: Callable[[Any], Any],
    expected: str,
    example: object,
    meaning: str,
    *,
    default: Any = None,
    words: tuple[str, ...] = (),
) -> Any:
    """A field of Options: how a value is read, and the words for errors and for the table.

    `accept` returns the value in its final form or raises Unfit. `words` are the names among which
    a misspelt one is looked for.
    """
    about = {
        "accept": accept if default is not None else either(nothing, accept),
        "expected": expected,
        "example": example,
        "meaning": meaning,
        "words": words,
    }
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Options:
    """What the user asked for. `Options.parse` is the way to make one: it checks every value."""

    stages: int | tuple[str, ...] | Literal["auto"] | None = option(
        either(whole, word("auto"), paths),
        "a number of stages of at least 1, a list of different module paths, or 'auto'",
        2,
        "number of stages, or the paths of the modules where stages 1, 2, ... begin, or `'auto'`; "
        "None: as many as ranks under torchrun, else 1",
        words=("auto",),
    )
    microbatches: int = option(
        whole, "a whole number of at least 1", 4, "number of parts of the batch", default=1
    )
    schedule: str | Schedule = option(
        schedule,
        "the name of a schedule, its text (one line per rank), or a fxpipe.Schedule",
        "1f1b",
        "name of a schedule, `'auto'`, its text (one line per rank) or a `fxpipe.Schedule`",
        default="1f1b",
    )
    ranks: int | None = option(
        whole,
        "a whole number of at least 1, or None",
        2,
        "number of ranks in one process; None: as the schedule says; under torchrun the world size",
    )
    lowering: str = option(
        word(*LOWERINGS),
        "one of 'inductor', 'eager' and 'cuda_graph'",
        "eager",
        "`'inductor'`: tasks are compiled; `'eager'`: their FX graphs run as they are; "
        "`'cuda_graph'`: `'inductor'` with `cuda_graphs='step'`",
        default="inductor",
        words=LOWERINGS,
    )
    cuda_graphs: str | bool = option(
        either(off, word(*CUDA_GRAPHS)),
        "one of 'step' and 'task', or False",
        "step",
        "capture as CUDA graphs, on a GPU: `'step'`: all that a process runs in a step as one; "
        "`'task'`: each call of a task as one; False: nothing",
        default=False,
        words=CUDA_GRAPHS,
    )
    passes: Mapping[str, bool] = option(
        mapping(switch),
        "a dict of the names of passes to True or False",
        {"split_weight_grads": False},
        "name of a pass to False: it is left out",
        default={},
    )
    extra_passes: tuple[tuple[str, str, Callable[[Any], Any]], ...] = option(
        insertions,
        "a list of tuples of 'before' or 'after', the name of a pass, and a function of a program",
        [("after", "assign_stages", Shown("my_pass"))],
        "passes of your own: `[('after', 'assign_stages', my_pass)]`; see docs/writing-a-pass.md",
        default=(),
        words=PLACES,
    )
    dump: str | None = option(
        folder, "a folder, or None", "dumps", "folder for the text of the program after every pass"
    )
    check: bool | Literal["first"] = option(
        either(switch, word("first")),
        "True, False or 'first'",
        True,
        "verify the program after every pass; `'first'`: also run the first step of each trace "
        "beside plain eager and stop where they differ",
        default=False,
        words=("first",),
    )
    trace: str | None = option(
        folder,
        "a folder, or None",
        "traces",
        "folder for a trace, timelines and metrics of the first steps; `fxpipe.trace` records "
        "others",
    )
    stop_after: str | None = option(
        text,
        "the name of a pass, or None",
        "assign_stages",
        "name of the pass after which to stop",
    )
    loss: int | str | None = option(
        either(index, text),
        "the number or the name of an output, or None",
        0,
        "which of several scalar outputs is the loss: its number among them, from 0, or the name "
        "of the operator that makes it, as the error without this option lists both",
    )
    loss_reduction: str | None = option(
        word(*LOSS_REDUCTIONS),
        "one of 'mean' and 'sum', or None",
        "mean",
        "how microbatch losses make the batch's, where the graph does not show it",
        words=LOSS_REDUCTIONS,
    )
    batch_dims: Mapping[str, int | None] = option(
        mapping(either(nothing, index)),
        "a dict of argument names or paths to a dimension of at least 0, or to None",
        {"batch.x": 0},
        "argument name or path such as `batch.x` to the dimension that is split; None: not split",
        default={},
    )
    buffers: str | None = option(
        word("microbatch"),
        "'microbatch', or None",
        "microbatch",
        "`'microbatch'`: buffers that the model itself writes, such as a counter, are written by "
        "every microbatch; None: a model that does so is refused for more than one microbatch",
        words=("microbatch",),
    )
    batchnorm: str = option(
        word(*BATCHNORMS),
        "one of 'microbatch' and 'defer'",
        "defer",
        "running statistics of BatchNorm in training, which normalises each microbatch by its own: "
        "`'microbatch'`: updated by one microbatch after another; `'defer'`: once a step, by mean "
        "and variance of the whole batch",
        default="microbatch",
        words=BATCHNORMS,
    )
    timeout: float = option(
        number,
        "a number of seconds above 0",
        60.0,
        "seconds after which a rank that waits for another gives up",
        default=60.0,
    )
    memory_limit: float | None = option(
        number,
        "a number above 0, or None",
        16e9,
        "for `schedule='auto'` and `stages='auto'`: what a rank may hold of parameters, gradients "
        "and saved values, in bytes, or up to 1 as a fraction of its device's memory",
    )

    @staticmethod
    def parse(given: Mapping[str, Any] | None = None) -> Options:
        """Read options; what they leave out is taken from the environment, then from the defaults.

        Raises OptionError for an unknown name, a wrong type or an impossible value.
        """
        if given is not None and not isinstance(given, Mapping):
            raise OptionError(
                f"options is a {type(given).__name__}, expected a dict; write for instance "
                f"options={{'stages': 2}}"
            )
        by_variable = _from_environment()
        # A variable stands in for None as for an option that is left out.
        values = by_variable | {
            name: value
            for name, value in (given or {}).items()
            if value is not None or name not in by_variable
        }
        about = {entry.name: entry.metadata for entry in fields(Options)}
        for name in values:
            if name not in about:
                raise OptionError(
                    f"option {name!r} is unknown, expected one of {', '.join(about)}; "
                    f"{nearest(name, about) or 'remove it'}"
                )
        read = {name: _read(name, value, about[name]) for name, value in values.items()}
        if read.get("lowering") == "cuda_graph":
            read["lowering"] = "inductor"
            read["cuda_graphs"] = read.get("cuda_graphs") or "step"
        return Options(**read)


def _read(name: str, value: Any, about: Mapping[str, Any]) -> Any:
    try:
        return about["accept"](value)
    except Unfit:
        example = f"write for instance options={{{name!r}: {about['example']!r}}}"
        raise OptionError(
            f"option {name!r} is {value!r} ({type(value).__name__}), expected {about['expected']}; "
            f"{nearest(value, about['words']) or example}"
        ) from None


def nearest(name: object, names: Iterable[str]) -> str:
    """`did you mean 'stages'?`, or nothing where no name is near."""
    by_case = {known.casefold(): known for known in names}
    found = difflib.get_close_matches(str(name).casefold(), by_case, n=1)
    return f"did you mean {by_case[found[0]]!r}?" if found else ""


def _from_environment() -> dict[str, Any]:
    """The options that variables give. An empty variable counts as none."""
    found: dict[str, Any] = {}
    for variable in ENVIRONMENT:
        value = os.environ.get(variable.name, "").strip()
        if not value or variable.option is None:
            continue
        found[variable.option] = value
        if variable.option == "check":
            known = _SWITCH | {"first": "first"}
            found["check"] = _look_up(variable.name, value, known, "1, 0 or first")
    return found


def log_level() -> int | None:
    """The level of Python's `logging` that FXPIPE_LOG asks for; None where it is not set."""
    value = os.environ.get("FXPIPE_LOG", "").strip()
    if not value:
        return None
    level: int = _look_up("FXPIPE_LOG", value, LOG_LEVELS, "0, 1, 2, warning, info or debug")
    return level


def _look_up(variable: str, value: str, known: Mapping[str, Any], expected: str) -> Any:
    if value.lower() not in known:
        advice = nearest(value, known) or f"set for instance {variable}=1"
        raise OptionError(f"{variable}={value} is unknown, expected {expected}; {advice}")
    return known[value.lower()]


def options_table() -> str:
    """The options as a Markdown table, for the documentation."""
    rows = ["| option | default | meaning |", "| --- | --- | --- |"]
    defaults = Options()
    for entry in fields(Options):
        default = getattr(defaults, entry.name)
        rows.append(f"| `{entry.name}` | `{default!r}` | {entry.metadata['meaning']} |")
    return "\n".join(rows)


def environment_table() -> str:
    """The environment variables as a Markdown table, for the documentation."""
    rows = ["| variable | option | meaning |", "| --- | --- | --- |"]
    for name, of_option, meaning in ENVIRONMENT:
        rows.append(f"| `{name}` | {f'`{of_option}`' if of_option else ''} | {meaning} |")
    return "\n".join(rows)
