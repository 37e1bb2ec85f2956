"""Nodes -> the modules of the model that they are inside of."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch.fx as fx


def module_paths(node: fx.Node) -> list[str]:
    """The paths of the modules that a node is inside of, outermost first, without the model."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = []
    for path, _ in stack.values():
        keys = re.findall(r"\['?([^'\]]+)'?\]|\.([^.\[]+)", re.sub(r"^[LG]\['?\w+'?\]", "", path))
        inner = [a or b for a, b in keys if (a or b) not in ("_modules", "__closure__")]
        if inner:
            paths.append(".".join(inner))
    return paths


def modules_by_stage(nodes: Iterable[fx.Node]) -> dict[int, tuple[str, ...]]:
    """Stage -> the outermost modules that run in it alone, in the order in which they run.

    nodes: of the forward, with their stages in meta.
    """
    inside = [(n.meta["stage"], module_paths(n)) for n in nodes if "stage" in n.meta]
    stages: dict[str, set[int]] = {}
    for stage, paths in inside:
        for path in paths:
            stages.setdefault(path, set()).add(stage)
    found: dict[int, dict[str, None]] = {}
    for stage, paths in inside:
        own = next((path for path in paths if len(stages[path]) == 1), None)
        if own is not None:
            found.setdefault(stage, {})[own] = None
    return {stage: tuple(paths) for stage, paths in found.items()}
