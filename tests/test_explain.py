"""`fxpipe.explain`: what it says, in which forms, and that it leaves the model as it was."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe.errors import FxpipeError
from fxpipe.explanation import Explanation
from fxpipe.views.explanation_text import brief
from tests.helpers import GPT, MLP, ConvNet, convnet_batch, gpt_batch, mlp_batch

OPTIONS = {"stages": 2, "microbatches": 2, "schedule": "zb-h1", "lowering": "eager"}


def compiled(model: torch.nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="fxpipe", options={**OPTIONS, **options})


@pytest.fixture(scope="module")
def found() -> Explanation:
    return fxpipe.explain(compiled(GPT(), passes={"normalize": False}), *gpt_batch())


def test_stages_have_their_modules_parameters_and_work(found: Explanation) -> None:
    first, last = found.stages
    assert first.modules == ("tokens", "blocks.0") and "head" in last.modules
    assert first.ranks == (0,) and last.ranks == (1,)
    # Linear layers of block 0: 2 rows of 4 tokens, two operations per weight.
    assert first.flops["F"] >= 2 * 8 * (8 * 24 + 8 * 8 + 8 * 16 + 16 * 8)
    assert first.parameter_bytes == 8 * first.parameters
    tokens = 11 * 8
    assert last.parameters == tokens + 8 * 2 + 8 * 24 + 24 + 8 * 8 + 8 + 8 * 16 + 16 + 16 * 8 + 8
    assert min(first.saved, last.saved) > 0


def test_edges_ranks_and_passes_are_listed(found: Explanation) -> None:
    assert [(edge.source, edge.target) for edge in found.edges] == [(0, 1), (1, 0)]
    assert found.edges[0].values[0][1:] == ("f64[2, 4, 8]", 2 * 4 * 8 * 8)
    assert [rank.messages for rank in found.ranks] == [3, 4]
    # The sum of the tied weight's gradient goes both ways, the loss to rank 0.
    assert found.sent == 4 * 2 * 4 * 8 * 8 + 2 * 11 * 8 * 8 + 8
    assert found.ranks[0].peak > found.ranks[0].weights > found.stages[0].parameter_bytes
    assert 0 < found.bubble < 1 and found.seconds > max(rank.busy for rank in found.ranks)
    assert [entry.name for entry in found.passes if not entry.on] == ["normalize"]
    assert found.rows == (2, 2) and found.actions[0].startswith("0F0 0F1")


def test_text_names_what_matters(found: Explanation) -> None:
    text = str(found)
    assert text.startswith("2 stages on 2 ranks, schedule zb-h1, 2 microbatches of 2 rows")
    assert "tokens, blocks.0" in text and "0 -> 1" in text and "off: normalize" in text
    assert "step  rank 0  rank 1" in text


def test_json_and_back_is_the_same(found: Explanation) -> None:
    assert Explanation.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_terminal_and_notebook_get_tables(found: Explanation) -> None:
    rich = pytest.importorskip("rich.console")
    console = rich.Console(file=io.StringIO(), width=160, force_terminal=True)
    console.print(found)
    assert "Stages" in console.file.getvalue() and "\x1b[" in console.file.getvalue()
    page = found._repr_html_()
    assert page.count("<table>") == 3 and "blocks.0" in page


def test_names_are_escaped_in_a_notebook() -> None:
    model = MLP(3, 3, 3)
    model.add_module("<b>", torch.nn.Linear(3, 3, dtype=torch.float64))

    class Hostile(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Any, y: Any) -> Any:
            return self.inner(self.inner._modules["<b>"](x), y)

    found = fxpipe.explain(compiled(Hostile()), *mlp_batch())
    assert "&lt;b&gt;" in found._repr_html_() and "<b>" in str(found)


def test_before_the_first_step_it_asks_for_arguments() -> None:
    with pytest.raises(FxpipeError, match="call it once, or give explain the arguments"):
        fxpipe.explain(compiled(MLP(3, 3, 3)))


def test_explaining_leaves_buffers_gradients_and_random_numbers() -> None:
    model = ConvNet()
    step = compiled(model)
    before = {name: value.clone() for name, value in model.named_buffers()}
    state = torch.get_rng_state()
    fxpipe.explain(step, *convnet_batch())
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    step(*convnet_batch())
    assert any(not torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_the_step_that_ran_last_is_explained() -> None:
    step = compiled(MLP(3, 3, 3))
    for rows in (4, 6):
        step(*mlp_batch(rows)).backward()
    assert fxpipe.explain(step).rows == (3, 3)
    assert fxpipe.explain(step, *mlp_batch(5)).rows == (3, 2)


def test_many_names_are_cut_short() -> None:
    assert brief(list("abcdefgh")) == "a, b, c, d, ... h (8)"
