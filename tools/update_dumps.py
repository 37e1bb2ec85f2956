"""What examples/mlp.py dumps today -> the pages that show parts of it: README and docs/how-*.md.

A part of a block is replaced by the dumped part with the same head (`graph 1I(`, `edge 0 -> 1:`)
that is most like it, since a graph is dumped after every pass. What the tests compare stays theirs.
"""

import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("how-*.md")))
BLOCK = re.compile(r"^```\n((?:graph |schedule |edge ).*?)^```", re.M | re.S)
HEAD = re.compile(r"graph \w+\(|schedule \S+|edge \d+ -> \d+:")


def dumped_parts() -> dict[str, list[str]]:
    """Head -> the parts of all dumps that begin with it."""
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples" / "mlp.py"), "--lowering", "eager"]
        subprocess.run([*command, "--dump", folder], check=True, stdout=subprocess.DEVNULL)
        for path in sorted(Path(folder).rglob("*.txt")):
            for part in path.read_text().split("\n\n"):
                head = HEAD.match(part)
                if head is not None:
                    found.setdefault(head[0], []).append(part.strip("\n"))
    return found


def updated(text: str, parts: dict[str, list[str]]) -> str:
    def newest(part: str) -> str:
        head = HEAD.match(part)
        known = parts.get(head[0], []) if head else []
        likeness = [difflib.SequenceMatcher(None, part, other).ratio() for other in known]
        return known[likeness.index(max(likeness))] if known else part

    def block(match: re.Match[str]) -> str:
        shown = "\n\n".join(newest(part.strip("\n")) for part in match[1].split("\n\n"))
        return f"```\n{shown}\n```"

    return BLOCK.sub(block, text)


def main() -> None:
    parts = dumped_parts()
    for path in PAGES:
        text = path.read_text()
        if updated(text, parts) != text:
            path.write_text(updated(text, parts))
            print(f"updated {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
