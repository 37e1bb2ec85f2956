"""One random model, captured once, run by many plans and compared with unsplit eager.

Dynamo takes most of the time of a first call, the joint trace most of the rest, and neither reads
what a plan chooses. So both are kept for all plans of a model, and nothing else is: what `capture`
makes of a graph goes into a `Step` for each plan, as `fxpipe.backend` does for a user's one plan,
and each step's pipeline runs the passes up to the joint trace once for each size. A few plans come
the user's way, `torch.compile(backend="fxpipe")`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fxpipe.backend import failure
from fxpipe.capture import Capture, capture
from fxpipe.errors import FxpipeError
from fxpipe.lowering import decisions
from fxpipe.lowering.runtime import Step
from fxpipe.options import Options
from fxpipe.passes import default_pipeline
from fxpipe.pipeline import Pipeline, name_of
from fxpipe.program import Program
from tests.fuzz.batches import Batch, make_batch
from tests.fuzz.models import RandomModel
from tests.fuzz.plans import Plan, random_sizes

LIMIT = 1e-9
FLOOR = 1e-3  # of the largest gradient: what should be zero is rounding alone


class Calls(NamedTuple):
    """What calls in a row gave: outputs of each, the sums of gradients, the buffers afterwards."""

    outputs: list[list[Tensor]]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class SharedFront(Pipeline):
    """A pipeline whose passes up to TraceJoint run once for all plans of a model.

    They read the graph, the sizes, and options that no plan sets; the first to read stages, ranks
    or places is AssignStages. A pass returns a new program and leaves the one that it was given as
    it was (`check`, on here, holds it to that), so what was kept is what would be made again.
    """

    known: dict[Any, dict[str, Any]] = field(default_factory=dict)

    def run_passes(self, program: Program, first: int, end: int) -> Program:
        cut = [name_of(pass_) for pass_ in self.passes].index("trace_joint") + 1
        if first >= cut:
            return super().run_passes(program, first, end)
        key = id(program.model), tuple(program.sizes.items())
        if key not in self.known:
            checking = Pipeline(self.passes, self.optional, replace(self.options, check=True))
            traced = checking.run_passes(program, first, cut)
            values = {entry.name: getattr(traced, entry.name) for entry in fields(Program)}
            made = {k: v for k, v in values.items() if v is not getattr(program, k)}
            self.known[key] = made
        return super().run_passes(replace(program, **self.known[key]), cut, end)


class Trial:
    """The model of a number, and the steps that its plans make of it."""

    def __init__(self, number: int) -> None:
        torch._dynamo.reset()
        self.number = number
        self.model = RandomModel(number).double()
        self.sizes = random_sizes(random.Random(number))
        self.state = copy.deepcopy(self.model.state_dict())
        self.reference = copy.deepcopy(self.model)
        self.expected: dict[Any, Calls] = {}
        self.fronts: dict[Any, dict[str, Any]] = {}
        self.captures: list[Capture] = []  # which keeps their ids from being used again
        self.options = Options()
        self.steps: dict[int, Step] = {}
        # Where Dynamo would rather run the model unpipelined, fullgraph makes it an error.
        self.compiled = torch.compile(self.model, backend=self.backend, fullgraph=True)

    def backend(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., list[Any]]:
        """The backend, but for the plan: that is looked up in the call."""
        try:
            captured = capture(gm, inputs, self.options)
        except FxpipeError as error:
            return failure(error, 1)
        self.captures.append(captured)

        def call(*arguments: Any) -> list[Any]:
            return self.step(captured)(*arguments)

        return call

    def step(self, captured: Capture) -> Step:
        if id(captured) not in self.steps:
            made = default_pipeline(self.options)
            pipeline = SharedFront(made.passes, made.optional, made.options, known=self.fronts)
            self.steps[id(captured)] = Step(captured, self.options, pipeline, world_size=1)
        return self.steps[id(captured)]

    def run(self, plan: Plan, whole_way: bool) -> str:
        """What differs, or "equal". Raises what fxpipe raises."""
        self.options, self.steps = Options.parse(plan.options), {}
        # What one plan decided, the next must not find: a seed is the same run whatever ran before.
        decisions._known.clear()
        self.restart(self.model)
        step = self.compiled
        if whole_way:
            step = torch.compile(self.model, backend="fxpipe", options=plan.options, fullgraph=True)
        ours = self.calls(step, self.model, plan)
        key = plan.sizes, plan.evaluates_first, plan.scale
        if key not in self.expected:
            self.restart(self.reference)
            self.expected[key] = self.calls(self.reference, self.reference, plan)
        return compare(ours, self.expected[key])

    def restart(self, model: RandomModel) -> None:
        model.zero_grad(set_to_none=True)
        model.load_state_dict(self.state)

    def calls(self, step: Callable[..., Any], model: RandomModel, plan: Plan) -> Calls:
        outputs = []
        if plan.evaluates_first:
            outputs.append(self.call(step, model, self.batch(plan, 0), None))
        for number in range(len(plan.sizes)):  # the gradients of all calls add up
            outputs.append(self.call(step, model, self.batch(plan, number), plan.scale))
        gradients = {name: clone_of(p.grad) for name, p in model.named_parameters()}
        return Calls(outputs, gradients, {n: b.clone() for n, b in model.named_buffers()})

    def batch(self, plan: Plan, number: int) -> Batch:
        return make_batch(plan.sizes[number], 10 * self.number + number)

    def call(
        self, step: Callable[..., Any], model: RandomModel, batch: Batch, scale: float | None
    ) -> list[Tensor]:
        """One call, and backward unless `scale` is None; what it returned."""
        with torch.no_grad() if scale is None else nullcontext():
            values = [leaf for leaf in tree_leaves(step(*batch)) if isinstance(leaf, Tensor)]
        if scale is not None:
            trained = [v for v in values if v.requires_grad]
            if model.has_loss:
                trained = [v for v in trained if v.dim() == 0]
            roots = [v if v.dim() == 0 else v.square().mean() for v in trained]
            if roots:
                (torch.stack(roots).sum() * scale).backward()
        return [value.detach() for value in values]


def clone_of(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def compare(ours: Calls, theirs: Calls) -> str:
    for number, (mine, other) in enumerate(zip(ours.outputs, theirs.outputs, strict=True)):
        if len(mine) != len(other):
            return f"differs: call {number} has {len(mine)} outputs, not {len(other)}"
        for place, (own, given) in enumerate(zip(mine, other)):
            if (error := difference(own, given, 0.0)) > LIMIT:
                return f"differs: output {place} of call {number} is off by {error:.1e}"
    norms = [float(g.norm()) for g in theirs.gradients.values() if g is not None]
    floor = FLOOR * max(norms, default=0.0)
    for name, given in theirs.gradients.items():
        own = ours.gradients[name]
        own = torch.zeros_like(given) if own is None and given is not None else own
        given = torch.zeros_like(own) if given is None and own is not None else given
        if own is not None and given is not None:
            if (error := difference(own, given, floor)) > LIMIT:
                return f"differs: the gradient of {name} is off by {error:.1e}"
    for name, given in theirs.buffers.items():
        if (error := difference(ours.buffers[name], given, 0.0)) > LIMIT:
            return f"differs: the buffer {name} is off by {error:.1e}"
    return "equal"


def difference(own: Tensor, other: Tensor, floor: float) -> float:
    if (own.shape, own.dtype) != (other.shape, other.dtype):
        return float("inf")
    if not own.dtype.is_floating_point:
        return 0.0 if own.equal(other) else float("inf")
    if not bool(own.isfinite().all()):
        return float("inf")
    apart = float((own - other).norm())
    return apart / max(float(other.norm()), floor, 1e-300) if apart else 0.0
