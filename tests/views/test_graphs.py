"""Graphs of modules and of actions, in the forms in which they are drawn."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fxpipe.passes import default_pipeline
from fxpipe.program import Program
from fxpipe.views import graph_forms
from fxpipe.views.graph_forms import can_draw_svg, dot, draw, mermaid, model_explorer_costs, svg
from fxpipe.views.graphs import actions_picture, modules_picture
from fxpipe.views.palette import of_stage
from tests.helpers import GPT, captured, gpt_batch


def planned(**options: Any) -> Program:
    options = {"stages": 2, "microbatches": 2, "schedule": "zb-h1", **options}
    given = captured(GPT(), *gpt_batch()).with_options(**options)
    program = given.program(2, options["microbatches"], ranks=2)
    return default_pipeline(program.options)(program)


@pytest.fixture(scope="module")
def program() -> Program:
    return planned()


def test_modules_lie_in_their_stages_and_arrows_between_have_bytes(program: Program) -> None:
    picture = modules_picture(program)
    assert [title for title, _ in picture.groups.values() if title.startswith("stage")] == [
        "stage 0", "stage 1",
    ]  # fmt: skip
    crossing = [
        label
        for (source, target), label in picture.arrows.items()
        if picture.boxes[source].group == "0" and picture.boxes[target].group == "1"
    ]
    assert crossing and set(crossing) == {"512 B"}
    assert picture.boxes["0/blocks.0.qkv"].colour == of_stage(0)
    assert "flop" in picture.boxes["0/blocks.0.qkv"].label


def test_actions_have_the_arrows_of_their_data(program: Program) -> None:
    picture = actions_picture(program)
    assert picture.arrows["0F0", "1F0"] == "512 B" and picture.arrows["1I0", "0I0"] == "512 B"
    assert ("1I0", "1W0") in picture.arrows and ("1F0", "1I0") in picture.arrows
    assert ("0F0", "0F1") in picture.order
    assert picture.boxes["1W1"].group == "1"


def test_many_microbatches_are_folded() -> None:
    picture = actions_picture(planned(microbatches=64))
    assert len(picture.boxes) < 40
    assert "0F0" in picture.boxes and "0F63" in picture.boxes and "0F30" not in picture.boxes
    folded = [box.label for name, box in picture.boxes.items() if name.startswith("more")]
    shown = sum(1 for name in picture.boxes if not name.startswith("more"))
    assert shown + sum(int(label.split()[1]) for label in folded) == 64 * 6


def test_names_are_quoted_in_every_form(program: Program) -> None:
    picture = modules_picture(program)
    name, box = next(iter(picture.boxes.items()))
    picture.boxes[name] = replace(box, label='a"<b>\\')
    assert '"a\\"<b>\\\\"' in dot(picture)
    assert '["a#quot;&lt;b&gt;' in mermaid(picture)


def test_mermaid_has_a_subgraph_per_stage(program: Program) -> None:
    text = draw(program, "mermaid")
    assert text.startswith("flowchart TB\n") and '["stage 1"]' in text
    assert draw(program, "actions").startswith("flowchart LR\n")
    assert f"fill:{of_stage(1)}" in text


def test_model_explorer_has_stages_as_layers_and_edges_between_known_nodes(
    program: Program,
) -> None:
    (collection,) = json.loads(draw(program, "model-explorer"))
    nodes = {node["id"]: node for node in collection["graphs"][0]["nodes"]}
    assert len(nodes) == len(program.joint.graph.nodes)
    assert any(n["namespace"].startswith("stage 1/F/blocks/1") for n in nodes.values())
    assert {e["sourceNodeId"] for n in nodes.values() for e in n["incomingEdges"]} <= set(nodes)
    results = model_explorer_costs(program)["microbatch"]["results"]
    assert set(results) <= set(nodes) and max(entry["value"] for entry in results.values()) > 0


@pytest.mark.skipif(not can_draw_svg(), reason="needs graphviz and its command dot")
def test_svg_is_drawn(program: Program) -> None:
    assert "<svg" in draw(program, "svg") and "<svg" in draw(program, "actions", ".svg")


@pytest.mark.skipif(not can_draw_svg(), reason="needs graphviz and its command dot")
def test_modules_run_down_the_page_and_actions_to_the_right(program: Program) -> None:
    picture = modules_picture(planned(stages=4))
    (narrow, _), _ = drawn(svg(picture))
    picture.direction = "LR"
    (wide, _), _ = drawn(svg(picture))
    assert narrow < 0.75 * wide
    (width, height), _ = drawn(draw(program, "actions", ".svg"))
    assert width > height


@pytest.mark.skipif(not can_draw_svg(), reason="needs graphviz and its command dot")
def test_labels_of_messages_leave_the_names_of_ranks_free(program: Program) -> None:
    _, texts = drawn(draw(program, "actions", ".svg"))
    actions = [x for text, x in texts if text in ("0F0", "1F0")]
    sizes = [x for text, x in texts if text == "512 B"]
    ranks = [x for text, x in texts if text.startswith("rank ")]
    assert len(ranks) == 2 and sizes
    assert max(ranks) + 30 < min(actions + sizes)


def drawn(text: str) -> tuple[tuple[int, int], list[tuple[str, float]]]:
    """Width and height of a picture, and its texts with where they stand from the left."""
    size = re.search(r'width="(\d+)pt" height="(\d+)pt"', text)
    assert size is not None
    texts = re.findall(r'<text [^>]*?\bx="([-\d.]+)"[^>]*>([^<]*)<', text)
    return (int(size[1]), int(size[2])), [(said, float(x)) for x, said in texts]


SCRIPT = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        return self.layers(x).square().mean()

def make():
    return Model(), (torch.randn(4, 4),)
"""


def test_command_draws_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    from fxpipe.cli import run

    script = tmp_path / "drawn.py"
    script.write_text(SCRIPT)
    target = f"{script}:make"
    assert run(["graph", target, "-f", "mermaid", "-o", "stages=2"]) == 0
    shown = capsys.readouterr().out
    assert "layers.2" in shown and '["stage 1"]' in shown
    assert run(["graph", target, "-o", "model.svg"]) == 2
    said = capsys.readouterr().err
    assert "the option 'model.svg' has no value" in said and "named by --output" in said
    assert run(["graph", target, "-f", "boxes"]) == 2
    assert "--format 'boxes' is unknown; write one of svg" in capsys.readouterr().err


def test_command_writes_mermaid_where_graphviz_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("typer")
    from fxpipe import view_commands
    from fxpipe.cli import run

    for module in (graph_forms, view_commands):
        monkeypatch.setattr(module, "can_draw_svg", lambda: False)
    script = tmp_path / "drawn_too.py"
    script.write_text(SCRIPT)
    assert run(["graph", f"{script}:make", "--output", str(tmp_path / "model.svg")]) == 0
    assert "text for Mermaid instead" in capsys.readouterr().out
    assert (tmp_path / "model.mmd").read_text().startswith("flowchart")
