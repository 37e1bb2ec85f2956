"""The `fxpipe` command: what is typed -> a table, JSON or a picture, or one line of error."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from fxpipe.errors import FxpipeError
from fxpipe.views.progress import shown_by_command

USAGE_ERROR = 2


def main() -> None:
    """The entry point. A wrong wish ends with one line on stderr and exit code 2."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line; its exit code."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        return _complain(
            f"needs {' and '.join(missing)}; pip install 'fxpipe[cli]', or -e '.[cli]' in a clone"
        )
    from fxpipe.view_commands import app

    try:
        with shown_by_command():
            return int(app(arguments or ["--help"], prog_name="fxpipe", standalone_mode=False) or 0)
    except FxpipeError as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}")
    except Exception as error:
        # Usage errors of click, which typer has as its own copy or as a dependency.
        if not hasattr(error, "format_message"):
            raise
        return _complain(error.format_message() or "see fxpipe --help")


def _complain(message: str) -> int:
    # A checker's error has its grid after an empty line; the first line says it all.
    lines = [line for line in message.splitlines() if line.strip()]
    print(f"fxpipe: error: {lines[0] if lines else 'unknown'}", file=sys.stderr)
    return USAGE_ERROR
