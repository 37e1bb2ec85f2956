"""Templates and data -> one HTML page that loads nothing else (extra `viz`)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fxpipe.errors import OptionError
from fxpipe.views import palette

TEMPLATES = Path(__file__).parent / "templates"
MISSING = (
    "an HTML page needs jinja2, which is not installed; install fxpipe with its extra viz: "
    "pip install 'fxpipe[viz]', or in a clone pip install -e '.[viz]'"
)


def can_render() -> bool:
    return find_spec("jinja2") is not None


def render(template: str, **values: Any) -> str:
    """A page. What `values` hold is escaped: a module called `<script>` stays text.

    Raises OptionError where jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise OptionError(MISSING) from error
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def asset(name: str) -> Markup:
        return Markup((TEMPLATES / name).read_text(encoding="utf-8"))

    environment.globals["asset"] = asset
    return environment.get_template(template).render(colours=colours(), **values)


def colours() -> dict[str, Any]:
    """The palette, for style sheets and scripts."""
    kinds = {kind.value: colour for kind, colour in palette.KINDS.items()}
    kinds |= {"pair": palette.PAIR, "communication": palette.COMMUNICATION, "host": palette.HOST}
    return {"kinds": kinds, "stages": list(palette.STAGES)}
