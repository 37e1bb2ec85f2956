"""The one entry: a family's or a registered function's name becomes a Schedule."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fxpipe import packed
from fxpipe.checker import check_schedule
from fxpipe.costs import Costs
from fxpipe.errors import OptionError, ScheduleError
from fxpipe.schedule import Schedule
from fxpipe.schedules.custom import REGISTERED, call_registered, load
from fxpipe.schedules.family import FAMILIES, Family
from fxpipe.schedules.fit import fit_line, group_stages
from fxpipe.schedules.times import Times
from fxpipe.text_grid import Edges


def families() -> Mapping[str, Family]:
    """Every family by name."""
    return MappingProxyType(FAMILIES)


def build(
    name: str,
    *,
    stages: int,
    microbatches: int,
    ranks: int | None = None,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    forward_edges: Edges | None = None,
    **options: Any,
) -> Schedule:
    """The schedule of that name for any number of stages and microbatches.

    `name` may carry options of the family: `chimera:f=2` is `build("chimera", f=2)`. `costs` and
    `memory_limit` (in activations of one rank's share of the model for one microbatch) are used
    by the families whose rule asks for them, `forward_edges` (of stages that are no chain) to
    check what a registered function returns. Families hold for any edges from lower to higher
    stages that a chain implies.
    """
    name, options = _split_name(name, options)
    _check_sizes(stages=stages, microbatches=microbatches)
    family = None if name in REGISTERED else find(name)
    if ranks is None:
        ranks = family.default_ranks(stages) if family else stages
    _check_sizes(ranks=ranks)
    if ranks > stages:
        raise ScheduleError(
            f"schedule {name!r}: ranks={ranks} with stages={stages} leaves ranks without a stage; "
            f"use at most ranks={stages}"
        )
    if family is None:
        return call_registered(
            name,
            stages=stages,
            microbatches=microbatches,
            ranks=ranks,
            forward_edges=forward_edges,
            **options,
        )
    for option in options:
        if option not in family.options:
            known = ", ".join(family.options) or "none"
            raise ScheduleError(f"schedule {name!r} has no option {option!r}; it has {known}")
    family.refuse(ranks, stages, options)
    if costs is not None:
        options["costs"] = costs
    if memory_limit is not None:
        options["memory_limit"] = memory_limit
    return _fit(family, stages, microbatches, ranks, options)


def resolve(
    what: Schedule | str | Sequence[str] | os.PathLike[str],
    *,
    stages: int,
    microbatches: int,
    ranks: int | None = None,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    forward_edges: Edges | None = None,
    **options: Any,
) -> Schedule:
    """Whatever a user may give as a schedule, checked for so many stages and microbatches.

    A Schedule; its text, whole or by line; a path, or a text that ends in .txt or .csv; or the
    name of a family or of a registered function.
    """
    if is_name(what):
        return build(
            str(what),
            stages=stages,
            microbatches=microbatches,
            ranks=ranks,
            costs=costs,
            memory_limit=memory_limit,
            forward_edges=forward_edges,
            **options,
        )
    schedule = what if isinstance(what, Schedule) else _read(what, forward_edges)
    check_schedule(schedule, stages, microbatches, forward_edges)
    return schedule


def stages_for(what: Schedule | str | Sequence[str] | os.PathLike[str], ranks: int | None) -> int:
    """How many stages suit a schedule: those that it names, or what its family puts on the ranks.

    For "auto" two a rank, so that every family can be built: linear ones run two stages as one.
    Raises OptionError where neither the schedule nor `ranks` says how many.
    """
    if not is_name(what):
        given = what if isinstance(what, Schedule) else _read(what)
        return given.num_stages
    if ranks is None:
        raise OptionError(
            f"stages='auto' and schedule={what!r} do not say how many ranks there are; give "
            f"options={{'ranks': 4}} or start the program under torchrun"
        )
    if what == "auto":
        return 2 * ranks
    assert isinstance(what, str)
    name, _ = _split_name(what, {})
    return ranks if name in REGISTERED else ranks * find(name).chunks(2 * ranks, ranks)


def _read(
    what: str | Sequence[str] | os.PathLike[str], forward_edges: Edges | None = None
) -> Schedule:
    if isinstance(what, os.PathLike) or (isinstance(what, str) and not is_text(what)):
        return load(what, check=False, forward_edges=forward_edges)
    return Schedule.parse(what)


def is_name(what: object) -> bool:
    """Whether this is the name of a family or a registered function: no text and no file."""
    return isinstance(what, str) and not what.endswith((".txt", ".csv")) and not is_text(what)


def is_text(what: str) -> bool:
    """Whether this is a schedule's text and no name: more than one line, or it begins with 0F."""
    return "\n" in what or bool(re.match(r"\s*(rank\s+\d+\s*:|\[?\d+[FIWBSR])", what))


def _fit(
    family: Family, stages: int, microbatches: int, ranks: int, options: dict[str, Any]
) -> Schedule:
    """The schedule of the next legal size, with stages grouped and what does not exist dropped."""
    chunks = family.chunks(stages, ranks)
    groups = group_stages(stages, ranks * chunks)
    if costs := options.pop("costs", None):
        options["times"] = Times.of(costs, groups, ranks=ranks, stages=stages)
    given = {key: options[key] for key in family.takes if key in options}
    if family.has_chunks:
        given["v"] = chunks
    lines = family.lines(ranks, family.legal_microbatches(ranks, microbatches), **given)
    return Schedule.from_packed(
        [fit_line(line, groups, microbatches) for line in lines], family.name
    )


def find(name: str) -> Family:
    """The family of that name, or ScheduleError with the nearest name."""
    if name in FAMILIES:
        return FAMILIES[name]
    known = sorted({*FAMILIES, *REGISTERED})
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else "use one of these"
    raise ScheduleError(f"there is no schedule {name!r}; {hint} (known: {', '.join(known)})")


def _split_name(name: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    name, _, rest = name.partition(":")
    found = dict(options)
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not (key and equals and value.isdigit()):
            raise ScheduleError(
                f"{item!r} is no schedule option; expected <name>=<number> as in 'chimera:f=2'"
            )
        found[key.strip()] = int(value)
    return name.strip(), found


def _check_sizes(**sizes: int) -> None:
    for what, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= packed.LIMIT:
            raise ScheduleError(
                f"{what}={size!r}; expected a whole number from 1 to {packed.LIMIT}"
            )
