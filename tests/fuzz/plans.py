"""A seed -> how to run a model: stages, microbatches, schedule, ranks, batches of some sizes."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from fxpipe.errors import FxpipeError
from fxpipe.schedule import Action, Kind, Pair, Schedule, Step, actions_of
from fxpipe.schedules import build, families
from tests.fuzz.models import RandomModel

Task = tuple[Kind, int, int]  # kind, stage, microbatch
OPTIONAL_PASSES = ("normalize", "split_weight_grads", "merge_pairs", "plan_last_uses")


class Plan(NamedTuple):
    """`sizes`: the rows of each call whose gradients add up; `scale`: what backward is given."""

    options: dict[str, Any]
    sizes: tuple[int, ...]
    scale: float
    evaluates_first: bool

    def __str__(self) -> str:
        shown = {k: v.ranks if isinstance(v, Schedule) else v for k, v in self.options.items()}
        if isinstance(shown["schedule"], tuple):
            shown["schedule"] = str(self.options["schedule"]).replace("\n", " / ")
        first = ", evaluated first" if self.evaluates_first else ""
        return f"rows {list(self.sizes)}, times {self.scale}{first}; {shown}"


def random_sizes(rng: random.Random) -> list[tuple[int, ...]]:
    """The calls that the plans of one model choose from: few, since each size is traced."""
    rows = [rng.randint(1, 9) for _ in range(3)]
    return [(rows[0],), (rows[1],), (rows[0], rows[2])]


def random_plan(rng: random.Random, model: RandomModel, sizes: list[tuple[int, ...]]) -> Plan:
    """A plan that fxpipe should take: families get sizes that they are made for."""
    stages, count = random_stages(rng, model)
    microbatches = 1 if model.reads_whole_batch else rng.randint(1, 6)
    schedule, ranks = random_schedule(rng, model, count, microbatches)
    switched_off = [name for name in OPTIONAL_PASSES if rng.random() < 0.1]
    options = {
        "stages": stages,
        "microbatches": microbatches,
        "schedule": schedule,
        "ranks": ranks,
        "lowering": "eager",
        "check": rng.choice([False] * 15 + [True] * 4 + ["first"]),
        "passes": dict.fromkeys(switched_off, False),
    }
    scale = rng.choice([1.0, 1.0, 1.0, 0.25, -3.0])
    return Plan(options, rng.choice(sizes), scale, rng.random() < 0.05)


def random_stages(rng: random.Random, model: RandomModel) -> tuple[Any, int]:
    """The option `stages`, and the number of stages that it makes."""
    if model.num_annotated:
        return None, model.num_annotated
    used = model.modules_in_use()
    if used[1:] and rng.random() < 0.3:
        chosen = sorted(rng.sample(used[1:], rng.randint(1, min(4, len(used) - 1))), key=used.index)
        return [f"ops.{name}" for name in chosen], len(chosen) + 1
    count = rng.randint(1, min(6, 1 + len(model.live_steps())))
    return count, count


def random_schedule(
    rng: random.Random, model: RandomModel, stages: int, microbatches: int
) -> tuple[str | Schedule, int | None]:
    """The options `schedule` and `ranks`: a family, its schedule as text, or an order of our own.

    A model without a loss runs its forwards in the call and its backwards later.
    """
    if rng.random() < 0.4:
        schedule = random_order(rng, stages, microbatches, forwards_first=not model.has_loss)
        return (str(schedule) if rng.random() < 0.3 else schedule), None
    for _ in range(20):
        name, ranks = rng.choice(sorted(families())), rng.choice([None, rng.randint(1, stages)])
        try:
            schedule = build(name, stages=stages, microbatches=microbatches, ranks=ranks)
        except FxpipeError:  # a family for an even number of ranks, for instance
            continue
        if model.has_loss and rng.random() < 0.2:
            return str(schedule), ranks
        if model.has_loss or ranks is not None:
            return name, ranks
    return "gpipe", None


def random_order(
    rng: random.Random, stages: int, microbatches: int, forwards_first: bool
) -> Schedule:
    """Any order that the data flow of a chain allows, on ranks that are drawn.

    One action after another is drawn from those that could run, so that the order of the draws is
    one in which the ranks can run it. Mostly a stage has one rank, else each microbatch its own.
    """
    num_ranks = rng.randint(1, stages)
    ranks = [rng.randrange(num_ranks) for _ in range(stages)]
    spread = rng.random() < 0.25
    home = {
        (stage, k): rng.randrange(num_ranks) if spread else ranks[stage]
        for stage in range(stages)
        for k in range(microbatches)
    }
    split = rng.choice([0.0, 0.5, 1.0])
    splits = {place: rng.random() < split for place in home}
    pairs = rng.choice([0.0, 0.0, 0.6])
    lines: list[list[Step]] = [[] for _ in range(num_ranks)]
    done: set[Task] = set()
    waiting = tasks_of(splits)
    while waiting:
        ready = [task for task in waiting if can_run(task, done, stages)]
        if forwards_first:
            ready = [task for task in ready if task[0] is Kind.F] or ready
        first = rng.choice(ready)
        partners = [task for task in ready if home[task[1:]] == home[first[1:]]]
        step = draw_pair(rng, first, partners) if rng.random() < pairs else None
        step = step if step is not None and not forwards_first else action_of(first)
        lines[home[first[1:]]].append(step)
        ran = {(action.kind, action.stage, action.microbatch) for action in actions_of(step)}
        done |= ran
        waiting = [task for task in waiting if task not in ran]
    return Schedule(tuple(tuple(line) for line in lines if line))


def tasks_of(splits: dict[tuple[int, int], bool]) -> list[Task]:
    backward = {True: (Kind.I, Kind.W), False: (Kind.B,)}
    return [(kind, *at) for at, split in splits.items() for kind in (Kind.F, *backward[split])]


def can_run(task: Task, done: set[Task], stages: int) -> bool:
    kind, stage, k = task
    if kind is Kind.W:
        return (Kind.I, stage, k) in done
    if kind is Kind.F:
        return stage == 0 or (Kind.F, stage - 1, k) in done
    fed = stage == stages - 1 or any((b, stage + 1, k) in done for b in (Kind.I, Kind.B))
    return fed and (Kind.F, stage, k) in done


def draw_pair(rng: random.Random, first: Task, partners: list[Task]) -> Pair | None:
    """A forward and a backward of different microbatches that could both run now."""
    fits = [t for t in partners if t[2] != first[2] and (t[0] is Kind.F) != (first[0] is Kind.F)]
    if not fits:
        return None
    second = rng.choice(fits)
    forward, backward = (first, second) if first[0] is Kind.F else (second, first)
    return Pair(action_of(forward), action_of(backward))


def action_of(task: Task) -> Action:
    kind, stage, microbatch = task
    return Action(stage, kind, microbatch)
