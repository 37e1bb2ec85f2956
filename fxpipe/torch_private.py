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
from copy import copy
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import sympy
import torch
import torch.fx as fx
from torch._C import _DisableAutocast

# Tracing again from inside a backend with the batch marked dynamic: no public way exists. Dynamo
# restarts at once when this is raised; with `torch.compile(dynamic=True)` it is symbolic already.
from torch._dynamo import exc, maybe_mark_dynamic
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import RestartAnalysis as RestartAnalysis
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import CompileContext, TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.lowering import lowerings, make_fallback
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
# Copies tensors into others, on a GPU in few launches.
copy_all = torch._foreach_copy_
# What maybe_mark_dynamic sets on a tensor.
MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")

_again = list[Any]()  # the compilation in which another trace was asked for
_undo = list[Callable[[], None]]()  # what takes back what was set for that trace


class TraceAgain(exc.TensorifyScalarRestartAnalysis, exc.UnspecializeRestartAnalysis):
    """The first lets a backend ask for another trace; the second lets that differ from the first.

    A model that reads `x.shape` before all else has an operator there only when sizes are symbolic.
    """


def trace_again_with_dynamic_dims(dims: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Mark (tensor, dim) pairs dynamic and make Dynamo trace the frame again.

    Returns only in that second trace. Duck shaping is off for it: equal sizes get one symbol only
    where the model itself makes them equal, so a table of 8 rows is never taken for a batch of 8.
    """
    compilation = CompileContext.try_get()
    asked = any(known is compilation for known in _again)
    if asked and all(is_marked_dynamic(tensor, dim) for tensor, dim in dims):
        return take_back_marks()
    if not asked:
        take_back_marks()
        _again.append(compilation)
    _undo.append(
        partial(setattr, symbolic_config, "use_duck_shape", symbolic_config.use_duck_shape)
    )
    symbolic_config.use_duck_shape = False
    for tensor, dim in dims:
        before = {name: copy(tensor.__dict__[name]) for name in MARKS if name in tensor.__dict__}
        _undo.append(partial(set_marks, tensor, before))
        maybe_mark_dynamic(tensor, dim)
    raise TraceAgain(restart_reason="fxpipe: symbolic batch dimension")


def take_back_marks() -> None:
    """What a later trace must not find: a tensor keeps its marks, whatever it is given to next."""
    _again.clear()
    while _undo:
        _undo.pop()()


def set_marks(tensor: torch.Tensor, marks: dict[str, Any]) -> None:
    for name in MARKS:
        tensor.__dict__.pop(name, None)
    tensor.__dict__.update(marks)


def guard_on_hooks() -> None:
    """Trace anew where a module's hooks change after the first call; Dynamo would not look at them.

    It reads this setting when the backend has returned, so it cannot be set for one model alone.
    """
    torch._dynamo.config.skip_nnmodule_hook_guards = False


def is_marked_dynamic(tensor: torch.Tensor, dim: int) -> bool:
    """Whether Dynamo was told to keep this dimension symbolic, or by the user to keep it static."""
    marks = ("_dynamo_weak_dynamic_indices", "_dynamo_dynamic_indices", "_dynamo_static_indices")
    return any(dim in getattr(tensor, mark, ()) for mark in marks)


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


class Traced(NamedTuple):
    """What Dynamo traces at the moment, and for whom."""

    name: str  # of the module, or of the function
    place: str  # file:line
    backend: Any  # the function that was named in torch.compile
    fullgraph: bool
    traces: int  # that it has made before, as far as they count for its limit
    limit: int  # after so many it leaves further ones to Python
    model: torch.nn.Module | None  # None where it is a function


def now_traced() -> Traced | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_compile" and code.co_filename.endswith("_dynamo/convert_frame.py"):
            found = frame.f_locals
            backend = found["compiler_fn"]
            for wrapped in ("_torchdynamo_orig_backend", "compiler_fn"):
                backend = getattr(backend, wrapped, backend)
            traced = found["code"]
            given = getattr(found.get("frame"), "f_locals", {})
            own = given.get("fn", given.get(next(iter(traced.co_varnames), "")))
            own = getattr(own, "__self__", own)  # torch wraps the forward of modules of its own
            name, model = traced.co_name, None
            if isinstance(own, torch.nn.Module):
                name, model = type(own).__name__, own
                traced = getattr(type(own).forward, "__code__", traced)
            made = found["cache_size"].num_cache_entries_with_same_id_matched_objs
            place = f"{traced.co_filename}:{traced.co_firstlineno}"
            limit = torch._dynamo.config.recompile_limit
            full = bool(found.get("one_graph"))
            return Traced(name, place, backend, full, made, limit, model)
        frame = frame.f_back
    return None


class Lasting(list[Any]):
    """Callbacks of which `torch._dynamo.reset()` leaves ours, or a later model went unnoticed."""

    def clear(self) -> None:
        self[:] = [callback for callback in self if hasattr(callback, "fxpipe")]


def on_frame_left_to_python(told: Callable[[Traced, str, str], None]) -> None:
    """Have `told` called where Dynamo gives up on what a compiled call calls.

    It gets a reason and the line that is it, "" where Dynamo does not tell. The backend is not
    called then; Dynamo has public callbacks for the end of a compilation, which are not told what
    it was of.
    """
    before: list[tuple[int, int]] = []

    def started(about: Any) -> None:
        before[:] = [graphs_and_breaks()]

    def ended(about: Any) -> None:
        take_back_marks()
        error, reasons = sys.exc_info()[1], list(counters["graph_break"])
        graphs, breaks = graphs_and_breaks()
        nothing_came = error is None and bool(before) and before[0][0] == graphs
        if nothing_came and breaks > before[0][1]:
            error = exc.Unsupported(reasons[-1])
        traced = now_traced() if isinstance(error, exc.Unsupported) else None
        if traced is not None and frame_left_to_python() is None:
            reason = next(iter(str(error).strip().splitlines()), "unknown")
            told(traced, reason, own_line(getattr(error, "real_stack", None) or ()))

    known = callback_handler.end_callbacks
    if not any(hasattr(callback, "fxpipe") for callback in known):
        started.fxpipe = ended.fxpipe = True  # type: ignore[attr-defined]
        callback_handler.start_callbacks = Lasting([*callback_handler.start_callbacks, started])
        callback_handler.end_callbacks = Lasting([*known, ended])


def own_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """`model.py:12: h, _ = self.gru(x)`: the innermost of the frames that is none of torch's."""
    folder = str(Path(torch.__file__).parent)
    own = [frame for frame in stack if not frame.filename.startswith(folder)]
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""


def graphs_and_breaks() -> tuple[int, int]:
    """How many graphs Dynamo has handed to backends, and how many breaks it has counted."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


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
    in_module |= bool(re.search(r"\._(parameters|buffers|modules)\[", source_name(placeholder)))
    return source_name(placeholder).startswith("L[") and not in_module


def expression(size: int | torch.SymInt | torch.SymFloat) -> sympy.Expr:
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
        made = tuple(fake_inputs(mode))
        return aot_export_joint_with_descriptors(stack, gm, made).graph_module


def describe_placeholder(node: fx.Node) -> tuple[Literal["input", "tangent"], int]:
    """("input", its number among the traced inputs) or ("tangent", the output's number)."""
    desc = node.meta["desc"]
    if type(desc).__name__ == "TangentAOTInput":
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


class AddProductsInPlace(CustomGraphPass):
    """`new = addmm(acc, a, b); copy_(acc, new)` becomes `addmm_(acc, a, b)`.

    So the task had it, before Inductor took its writes apart: two copies of every gradient.
    """

    def __call__(self, graph: fx.Graph) -> None:
        aten = torch.ops.aten
        if aten.addmm_.default not in lowerings:  # by itself Inductor refuses it where $CI is set
            make_fallback(aten.addmm_.default, warn=False)
        for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
            accumulator, new = write.args[:2]
            is_sum = new.target is aten.addmm.default and new.args[0] is accumulator
            if is_sum and len(new.users) == 1 and set(accumulator.users) == {write, new}:
                with graph.inserting_before(write):
                    added = graph.call_function(aten.addmm_.default, new.args, new.kwargs)
                added.meta.update(write.meta)
                write.replace_all_uses_with(added)
                graph.erase_node(write)
                graph.erase_node(new)

    def uuid(self) -> str:
        """Part of the key of Inductor's caches: to be changed with what the pass does."""
        return "fxpipe add products in place, 2"


def inductor_compile(
    graph: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """What Inductor makes of a graph, and the code within: `current_callable` takes a list.

    meta["output_code"] of the graph names the file of that code.
    """
    known, made = len(PyCodeCache.modules), list[Any]()

    def inner(*args: Any, **kwargs: Any) -> Any:
        made.append(compile_fx_inner(*args, **kwargs))
        return made[-1]

    # C++ wrappers call this operator of all in a slow way.
    own = inductor_config.post_grad_custom_post_pass
    own = own if own or inductor_config.cpp_wrapper else AddProductsInPlace()
    with torch.no_grad(), autocast_off(), inductor_config.patch(post_grad_custom_post_pass=own):
        compiled: Any = compile_fx(graph, list(inputs), inner_compile=inner)
    graph.meta["output_code"] = next((m.__file__ for m in PyCodeCache.modules[known:][::-1]), None)
    return compiled, made


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
    read, written = list[torch.Tensor](), list[torch.Tensor]()
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
