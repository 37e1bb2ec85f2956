"""Matplotlib figures to files: same content, same bytes (extra `viz`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpipe.errors import OptionError
from fxpipe.views.palette import TEXT

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")


def new_figure(width: float, height: float, **settings: Any) -> Figure:
    """An empty figure, in inches. Raises OptionError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(
            "a picture needs matplotlib, which is not installed; install fxpipe with its extra "
            "viz: pip install 'fxpipe[viz]', or in a clone pip install -e '.[viz]'"
        ) from error
    return Figure(figsize=(width, height), **settings)


def check_path(path: str | Path) -> Path:
    """Where a picture may go; its suffix gives the format. Raises OptionError."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise OptionError(
            f"picture {path.name!r} has the suffix {path.suffix!r}; expected one of "
            f"{', '.join(SUFFIXES)}"
        )
    if not path.parent.is_dir():
        raise OptionError(f"picture {str(path)!r} lies in no folder that exists; make it first")
    return path


def add_legend(figure: Figure, entries: Sequence[Artist]) -> None:
    """One row of what colours mean, below all axes."""
    figure.legend(
        handles=list(entries),
        loc="lower left",
        bbox_to_anchor=(0.05, 0.0),
        ncols=len(entries),
        frameon=False,
        fontsize=9,
        labelcolor=TEXT,
    )


def save(figure: Figure, path: Path) -> None:
    import matplotlib

    # No date, and no random names in SVG.
    with matplotlib.rc_context({"svg.hashsalt": "fxpipe", "svg.fonttype": "none"}):
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=110, metadata=metadata)
