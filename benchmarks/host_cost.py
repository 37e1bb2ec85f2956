"""The Python of a step, without its tasks -> microseconds per action, of both ways to run it.

The tasks of a small model are replaced by functions that return values made before, so that what
is left is the cost of going from call to call: by the executors, which give and take turns rank by
rank, and by the replayed function, which is the fast path where all ranks are in one process.

python benchmarks/host_cost.py --microbatches 32
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from fxpipe.backend import fxpipe
from fxpipe.lowering.executor import Executor
from fxpipe.lowering.plan import Plan
from fxpipe.lowering.replay import Replay
from fxpipe.lowering.run import Run

WIDTH, WARM_UP, SAMPLES, ROUNDS = 4, 3, 30, 5


def plan_of(stages: int, microbatches: int, schedule: str) -> tuple[Plan, list[Any]]:
    """The plan of a chain of layers, and the inputs of its step."""
    kept: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        options = {"stages": stages, "microbatches": microbatches, "schedule": schedule}
        step: Any = fxpipe(gm, inputs, options=options | {"lowering": "eager"})

        def run(*values: Any) -> Any:
            kept[:] = [step, list(values)]
            return step(*values)

        return run

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(stages)))
    loss = torch.compile(lambda x: model(x).square().mean(), backend=backend)
    loss(torch.randn(2 * microbatches, WIDTH))
    step, values = kept
    (plan,) = step.plans.values()
    return plan, values


def without_work(plan: Plan) -> None:
    """Let every task return what it returned once."""
    for executor in plan.executors:
        for call in executor.program.graph.graph.find_nodes(op="call_module"):
            task = executor.program.graph.get_submodule(str(call.target))
            results = task.graph.output_node().args[0]
            made = tuple(torch.zeros(tuple(r.meta["val"].shape)) for r in results)
            task.function = lambda *_, made=made: made


def microseconds(step: Callable[[], Any], actions: int) -> float:
    """Per action: the fastest of several rounds, each the mean of a number of steps."""
    for _ in range(WARM_UP):
        step()
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(SAMPLES):
            step()
        found.append((time.process_time() - start) / SAMPLES)
    return 1e6 * min(found) / actions


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-h1"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'schedule':<12}{'actions':>9}{'executors us':>14}{'replayed us':>13}{'ratio':>8}")
    for name in given.schedules:
        plan, inputs = plan_of(given.stages, given.microbatches, name)
        actions, slow, fast = costs_of(plan, inputs)
        print(f"{name:<12}{actions:>9}{slow:>14.2f}{fast:>13.2f}{slow / fast:>8.2f}")


def costs_of(plan: Plan, inputs: list[Any]) -> tuple[int, float, float]:
    """How many actions a step has, and what each costs by executors and replayed."""
    actions = sum(len(executor.instructions) for executor in plan.executors)
    without_work(plan)
    executors = tuple(Executor(executor.program) for executor in plan.executors)
    ways = (
        replace(plan, executors=executors, replay=None),
        replace(plan, executors=executors, replay=Replay(executors)),
    )
    with torch.no_grad():
        slow, fast = (
            microseconds(lambda way=way: Run(way, inputs, 0).start(), actions) for way in ways
        )
    return actions, slow, fast


if __name__ == "__main__":
    main()
