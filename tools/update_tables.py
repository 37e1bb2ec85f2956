"""The tables of options, variables and errors -> the Markdown files that have a place for them.

A place is what stands between `<!-- table: options -->` (or another name) and `<!-- end -->`. With
--check nothing is written, and the exit status is 1 where a file is out of date.
"""

import inspect
import re
import sys
from pathlib import Path

from fxpipe import errors
from fxpipe.options import environment_table, options_table

ROOT = Path(__file__).parent.parent
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def errors_table() -> str:
    """Cause and cure of each class, the two paragraphs of its docstring."""
    rows = ["| error | cause | cure |", "| --- | --- | --- |"]
    for name, kind in vars(errors).items():
        if (
            isinstance(kind, type)
            and issubclass(kind, Exception)
            and kind is not errors.FxpipeError
        ):
            cause, _, cure = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
            rows.append(f"| `{name}` | {' '.join(cause.split())} | {' '.join(cure.split())} |")
    return "\n".join(rows)


TABLES = {
    "options": options_table,
    "environment": environment_table,
    "errors": errors_table,
}


def updated(text: str) -> str:
    return PLACE.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}\n{m[3]}", text)


def main() -> int:
    stale = 0
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = path.read_text()
        if updated(text) == text:
            continue
        stale += 1
        if "--check" in sys.argv[1:]:
            print(f"{path.relative_to(ROOT)} is out of date; run python tools/update_tables.py")
        else:
            path.write_text(updated(text))
    return int("--check" in sys.argv[1:] and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
