"""The suite's results -> a picture: every contestant's step beside torch's best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bars

COLOURS = {"fxpipe": "#2b6cb0", "torch": "#b7791f", "one process": "#718096"}


def draw(results: Mapping[str, Any], path: str) -> None:
    """Write a picture of one panel for each model; the file's ending says in which format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    presets = results["presets"]
    if not presets:
        return
    lowering = results["about"]["lowerings"][0]
    tallest = max(len(measured["rows"]) for measured in presets.values())
    figure, axes = pyplot.subplots(
        1, len(presets), figsize=(8 * len(presets), 1.5 + 0.24 * tallest), squeeze=False
    )
    for panel, (preset, measured) in zip(axes[0], presets.items()):
        rows = bars.Rows(measured["rows"], lowering)
        base = bars.fastest(rows.all("torch") or rows.rows)
        figures = sorted(
            ((bars.ratio(row, base), row) for row in rows.rows), key=lambda pair: pair[0].median
        )
        names = [f"{row['schedule']}  {row['name']}".strip() for _, row in figures]
        medians = [f.median for f, _ in figures]
        spread = [[f.median - f.low for f, _ in figures], [f.high - f.median for f, _ in figures]]
        shades = [
            next(c for name, c in COLOURS.items() if row["name"].startswith(name))
            for _, row in figures
        ]
        drawn = panel.barh(names, medians, xerr=spread, color=shades, error_kw={"linewidth": 0.8})
        for bar, (_, row) in zip(drawn, figures):
            bar.set_alpha(0.4 if bars.ALONE in row["name"] else 1.0)
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.invert_yaxis()
        panel.tick_params(axis="y", labelsize=7)
        panel.set_xlabel(f"step time to that of {bars.title(base)}; pale: tasks alone")
        panel.set_title(preset)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
