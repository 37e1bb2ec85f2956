"""What is left out of a compiled task after its first call, and that it computes the same."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxpipe.lowering import lean as leaning
from fxpipe.lowering.lean import lean, without_assertions
from fxpipe.torch_private import inductor_compile

aten = torch.ops.aten


def task(function: Any, *given: torch.Tensor) -> tuple[fx.GraphModule, Any, list[Any]]:
    graph = make_fx(function, tracing_mode="fake")(*given)
    return graph, *inductor_compile(graph, [n.meta["val"] for n in placeholders(graph)])


def placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return list(graph.graph.find_nodes(op="placeholder"))


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
    aten.addmm_(total, a, b)
    return (torch.relu(a @ b).sum(0),)


def batch() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.zeros(4, 5), torch.randn(4, 3), torch.randn(3, 5)]


def test_every_call_computes_the_same() -> None:
    given, expected = batch(), batch()
    _, compiled, codes = task(add_product, *given)
    run = lean(compiled, codes)
    for _ in range(3):
        torch.testing.assert_close(run(*given), add_product(*expected))
        torch.testing.assert_close(given[0], expected[0])


def test_the_first_call_checks_and_later_ones_go_straight_to_the_code() -> None:
    _, compiled, codes = task(add_product, *batch())
    calls = []

    def counted(*arguments: torch.Tensor) -> Any:
        calls.append(1)
        return compiled(*arguments)

    run = lean(counted, codes)
    total, a, b = batch()
    with pytest.raises(AssertionError):
        run(total, a.T.contiguous().T, b)
    for _ in range(3):
        run(total, a, b)
    assert len(calls) == 2


def test_code_without_assertions_keeps_its_lines() -> None:
    _, compiled, codes = task(add_product, *batch())
    compiled(*batch())
    code = codes[0].current_callable
    shorter = without_assertions(code)
    assert shorter.__self__ is code.__self__
    names = shorter.__func__.__code__.co_names
    assert not set(leaning.ASSERTIONS) & set(names) and "addmm_" in names
    lines = inspect.getsource(code.__func__).splitlines()
    first = code.__func__.__code__.co_firstlineno
    told = {line - first for *_, line in shorter.__func__.__code__.co_lines() if line is not None}
    assert any(".addmm_" in lines[i] for i in told)
    assert not any("assert_size" in lines[i] for i in told)


def test_code_that_is_not_of_python_stays_as_it_is() -> None:
    assert without_assertions(len) is len  # type: ignore[comparison-overlap]


def test_outputs_that_torch_makes_around_the_code_stay_right() -> None:
    def views(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b.add_(1)
        return a, a.T, b, (a + b).T, torch.ones(2)

    given = [torch.randn(3, 3), torch.zeros(3, 3)]
    expected = [v.clone() for v in given]
    _, compiled, codes = task(views, *given)
    run = lean(compiled, codes)
    for _ in range(3):
        found, right = run(*given), views(*expected)
        torch.testing.assert_close(tuple(found), right)
        assert found[0] is given[0] or found[0].data_ptr() == given[0].data_ptr()
