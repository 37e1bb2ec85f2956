"""Every private torch API that fxpipe uses, each with its reason. Tried on torch 2.13.

Nothing else in the project imports `torch._*`; a test walks the imports to hold that.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import sympy
import torch
import torch.fx as fx
from torch._C import _DisableAutocast

# Tracing again from inside a backend with the batch marked dynamic: no public way exists. Dynamo
# restarts at once when this exception is raised; with
# `torch.compile(dynamic=True)` the batch is symbolic from the start.
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.exc import RestartAnalysis as RestartAnalysis
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._logging._internal import trace_structured
from torch._subclasses import FakeTensorMode
from torch.fx.experimental import _config as symbolic_config
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

# Autocast off for all devices at once; torch.autocast(..., enabled=False) wants each by its name.
autocast_off = _DisableAutocast

_tracing_again = False


def trace_again_with_dynamic_dims(dims: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Mark (tensor, dim) pairs dynamic and make Dynamo trace the frame again.

    Returns only in that second trace. Duck shaping is off for it: equal sizes get one symbol only
    where the model itself makes them equal, so a table of 8 rows is never taken for a batch of 8.
    """
    global _tracing_again
    again = _tracing_again and all(is_marked_dynamic(tensor, dim) for tensor, dim in dims)
    _tracing_again = not again
    symbolic_config.use_duck_shape = again
    if again:
        return
    for tensor, dim in dims:
        maybe_mark_dynamic(tensor, dim)
    raise TensorifyScalarRestartAnalysis(restart_reason="fxpipe: symbolic batch dimension")


def guard_on_hooks() -> None:
    """Trace anew where a module's hooks change after the first call; Dynamo would not look at them.

    It reads this setting when the backend has returned, so it cannot be set for one model alone.
    """
    torch._dynamo.config.skip_nnmodule_hook_guards = False


def is_marked_dynamic(tensor: torch.Tensor, dim: int) -> bool:
    """Whether Dynamo was told to keep this dimension symbolic, or by the user to keep it static."""
    marks = ("_dynamo_weak_dynamic_indices", "_dynamo_dynamic_indices", "_dynamo_static_indices")
    return any(dim in getattr(tensor, mark, ()) for mark in marks)


def source_name(placeholder: fx.Node) -> str:
    """Where a Dynamo input comes from, as Dynamo writes it: `L['self']._modules['head']...`."""
    source = placeholder.meta["grapharg"].source
    return source.name if isinstance(source.name, str) else source.name()


def is_call_argument(placeholder: fx.Node) -> bool:
    """Whether a Dynamo input is an argument of the compiled call, not state of a module."""
    source = placeholder.meta["grapharg"].source
    kind = source.guard_source
    kind = kind() if callable(kind) else kind
    in_module = kind.is_unspecialized_nn_module() or kind.is_specialized_nn_module()
    if in_module or not source_name(placeholder).startswith("L["):
        return False
    return not re.search(r"\._(parameters|buffers|modules)\[", source_name(placeholder))


def graph_break_reason(gm: fx.GraphModule) -> tuple[str, Any] | None:
    """(reason, innermost user frame) of the graph break that ended this Dynamo graph, if any."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    return reason.reason, (reason.user_stack[-1] if reason.user_stack else None)


def frame_left_to_python() -> traceback.FrameSummary | None:
    """The frame between the compiled call and what Dynamo now traces, if there is one.

    After a graph break in a loop Dynamo runs the whole frame in Python, and traces what that calls.
    """
    frame: FrameType | None = sys._getframe(1)
    traced = False
    while frame is not None and not frame.f_code.co_filename.endswith("_dynamo/eval_frame.py"):
        name = Path(frame.f_code.co_filename).as_posix()
        inside = "/torch/_" in name or name.endswith("torch/nn/modules/module.py")
        if traced and not inside and "/contextlib" not in name:
            return traceback.FrameSummary(name, frame.f_lineno, frame.f_code.co_name)
        traced = traced or name.endswith("_dynamo/convert_frame.py")
        frame = frame.f_back
    return None


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """A size as a sympy expression, equalities that the trace found put in."""
    if isinstance(size, int):
        return sympy.Integer(size)
    node = size.node
    return node.shape_env.replace(node.expr)


def tie(size: int | torch.SymInt, other: int | torch.SymInt) -> None:
    """Let two sizes of a trace, equal in this call, be one; calls where they differ trace again."""
    torch._check(size == other)


def grouped_products() -> tuple[Any, ...]:
    """The functions that multiply each group of rows with its own matrix."""
    found = (getattr(torch, "_grouped_mm", None), getattr(torch.nn.functional, "grouped_mm", None))
    return tuple(function for function in found if function is not None)


def export_joint(
    gm: fx.GraphModule, fake_inputs: Callable[[FakeTensorMode], list[Any]], training: bool
) -> fx.GraphModule:
    """The ATen graph of `gm` on fake inputs: forward and, when training, backward.

    Placeholders and outputs carry descriptors in `meta["desc"]`: see `describe_*`.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(torch.set_grad_enabled(training))
        inputs = tuple(fake_inputs(mode))
        return aot_export_joint_with_descriptors(stack, gm, inputs).graph_module


def describe_placeholder(node: fx.Node) -> tuple[Literal["input", "tangent"], int]:
    """("input", its number among the traced inputs) or ("tangent", the output's number)."""
    desc = node.meta["desc"]
    name = type(desc).__name__
    if name == "TangentAOTInput":
        return "tangent", _index(desc.output)
    return "input", _index(desc)


def describe_outputs(gm: fx.GraphModule) -> list[tuple[str, int] | None]:
    """Per output of a joint graph: ("output" | "mutation" | "gradient", number) or None."""
    found: list[tuple[str, int] | None] = []
    for desc in gm.graph.output_node().meta["desc"]:
        match type(desc).__name__:
            case "PlainAOTOutput":
                found.append(("output", desc.idx))
            case "InputMutationAOTOutput":
                found.append(("mutation", _index(desc.mutated_input)))
            case "GradAOTOutput":
                found.append(("gradient", _index(desc.grad_of)))
            case "NoneType":
                found.append(None)
            case other:
                found.append((other, -1))
    return found


def _index(desc: Any) -> int:
    index = getattr(desc, "idx", None)
    if index is None:
        raise NotImplementedError(f"torch describes a value as {type(desc).__name__}")
    return int(index)


@contextlib.contextmanager
def fake_mode_of(values: Sequence[Any]) -> Iterator[Any]:
    """The fake mode that made the fake tensors among `values`, entered."""
    modes = [v.fake_mode for v in values if hasattr(v, "fake_mode")]
    with modes[0] if modes else contextlib.nullcontext() as mode:
        yield mode


def structured_trace(name: str, text: Callable[[], str]) -> None:
    """Hand a text to torch's structured trace, so that tlparse shows it among its artifacts."""
    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )


class AddProductsInPlace(CustomGraphPass):  # type: ignore[misc]
    """
    new = addmm(acc, a, b);  copy_(acc, new)

    becomes

    addmm_(acc, a, b)

    as the task had it before Inductor took its writes apart, which costs two copies of every
    weight's gradient. Inductor takes writes back for other operators, in the same place.
    """

    def __call__(self, graph: fx.Graph) -> None:
        aten = torch.ops.aten
        for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
            accumulator, new = copy.args[:2]
            readers = [user for user in accumulator.users if user not in (copy, new)]
            if new.target is not aten.addmm.default or new.args[0] is not accumulator:
                continue
            if len(new.users) > 1 or readers:
                continue
            with graph.inserting_before(copy):
                added = graph.call_function(aten.addmm_.default, new.args, new.kwargs)
            added.meta.update(copy.meta)
            copy.replace_all_uses_with(added)
            graph.erase_node(copy)
            graph.erase_node(new)

    def uuid(self) -> str:
        """Part of the key of Inductor's caches: to be changed with what the pass does."""
        return "fxpipe add products in place, 1"


def inductor_compile(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The function that Inductor makes of an ATen graph without gradients."""
    own = inductor_config.post_grad_custom_post_pass or AddProductsInPlace()
    with torch.no_grad(), autocast_off(), inductor_config.patch(post_grad_custom_post_pass=own):
        compiled: Callable[..., Any] = compile_fx(graph, list(inputs))  # type: ignore[assignment]
        return compiled


def own_inductor_cache(rank: int) -> None:
    """Let this process compile into a folder of its own, inside the one that it was given.

    On CPU a process can load a library that another is still writing ("file too short").
    """
    folder = Path(cache_dir())
    if folder.name != f"fxpipe-rank-{rank}":
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"fxpipe-rank-{rank}")


def found_infs(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> dict[torch.device, torch.Tensor]:
    """Device -> what the scaler reads before the optimizer's step: not 0 where an inf was found.

    Unscales the gradients if that was not done since the last update. An optimizer without
    gradients gets an entry: the scaler refuses a step for which nothing was looked at.
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"].name == "READY":
        scaler.unscale_(optimizer)
    found: dict[torch.device, torch.Tensor] = state["found_inf_per_device"]
    if not found:
        scale = scaler._scale
        assert scale is not None
        found[scale.device] = torch.zeros((), dtype=torch.float32, device=scale.device)
    return found


class OperatorMode(TorchDispatchMode):
    """Hands every operator below autograd to `operator`: no public way exists."""

    def operator(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.operator(func, args, kwargs or {})


def tensors_within(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in arg_tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def reads_and_writes(
    function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    """The tensors that an operator only reads, those that it writes to, and whether it is a view.

    What an operator does to its arguments is in its schema alone, which torch keeps private.
    """
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    given = dict(enumerate(arguments)) | keywords
    for i, argument in enumerate(function._schema.arguments):
        found = tensors_within(given.get(i, given.get(argument.name)))
        writes = argument.alias_info is not None and argument.alias_info.is_write
        (written if writes else read).extend(found)
    aliases = [value.alias_info for value in function._schema.returns]
    return read, written, any(alias is not None and not alias.is_write for alias in aliases)


def storage_number(tensor: torch.Tensor) -> int:
    """Tells storages apart as long as they live; storages without memory have no address."""
    return tensor.untyped_storage()._cdata
