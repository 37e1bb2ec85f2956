"""An error of a task -> the model's line that raised it, as far as it can be known."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx

from fxpipe.lowering import lean
from fxpipe.lowering.rank_program import RankProgram
from fxpipe.program import TORCH, where

# Operators that fail on some values of their arguments, whatever the shapes.
_FAIL_ON_VALUES = re.compile(
    r"index|embedding|gather|scatter|take|one_hot|nll|assert|bincount|multinomial|linalg|cholesky|"
    r"histc|repeat_interleave|select"
)
_MOST_CANDIDATES = 3


def task_call(program: RankProgram, action: str) -> fx.Node | None:
    """The node that calls the task of an action, given as text."""
    calls = program.graph.graph.find_nodes(op="call_module")
    return next((call for call in calls if str(call.meta.get("action")) == action), None)


def line_of(
    error: Exception, program: RankProgram, call: fx.Node, arguments: Sequence[Any] | None
) -> str:
    """` at m.py:7: x = self.table(ids)`; or nothing where no line is known.

    A task that runs as an FX graph tells it by its traceback. What Inductor makes of one keeps no
    lines: its graph is run again on the same arguments, without Inductor, to see which node fails.
    On a GPU, which may be of no use after an error, and where nothing fails the second time or the
    arguments are gone, the lines are named that can fail on values.
    """
    task = program.graph.get_submodule(call.target).graph
    if node := node_in_traceback(error, task):
        return f" at {where(node)}"
    if isinstance(error, torch.OutOfMemoryError) or raised_in_python(error):
        return ""
    if arguments and (node := node_that_fails(task, arguments)):
        return f" at {where(node)} (as its graph shows, run again without Inductor)"
    lines = list(dict.fromkeys(where(node) for node in candidates(task)))
    if not lines:
        return ""
    if len(lines) == 1:
        return f" probably at {lines[0]}"
    more = f" or {len(lines) - _MOST_CANDIDATES} more" if len(lines) > _MOST_CANDIDATES else ""
    return f" at one of {'; '.join(lines[:_MOST_CANDIDATES])}{more}"


def raised_in_python(error: Exception) -> bool:
    """Whether neither torch nor generated code is under the error: then no operator raised it."""
    names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    # What a compiled task calls is code that Inductor made, in a file of its cache.
    compiled = lean.__file__ in names[:-1]
    return not compiled and not any(n.startswith((TORCH, "<eval_with_key>")) for n in names)


def node_in_traceback(error: Exception, task: fx.Graph) -> fx.Node | None:
    """The node whose line of generated code is in the traceback: `name = call(...)`."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.line for f in frames if f.filename.startswith("<eval_with_key>") and f.line]
    name = re.match(r"\w+", lines[-1]) if lines else None
    found = (node for node in task.nodes if name and node.name == name[0])
    return next((node for node in found if node.meta.get("stack_trace")), None)


def node_that_fails(task: fx.Graph, arguments: Sequence[Any]) -> fx.Node | None:
    """The node that raises when the graph runs on copies of these values; none on a GPU."""
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    if task.owning_module is None or any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    finder = _Finder(task.owning_module, graph=task)
    try:
        with torch.no_grad():
            finder.run(*[a.clone() if isinstance(a, torch.Tensor) else a for a in arguments])
    except Exception:
        node = finder.last
        return node if node is not None and node.meta.get("stack_trace") else None
    return None


class _Finder(fx.Interpreter):
    """Knows the node that it runs."""

    last: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.last = n
        return super().run_node(n)


def candidates(task: fx.Graph) -> Iterator[fx.Node]:
    for node in task.nodes:
        if node.op == "call_function" and node.meta.get("stack_trace"):
            if _FAIL_ON_VALUES.search(str(node.target)):
                yield node
