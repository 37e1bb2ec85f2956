"""The folders of the repository -> `.typing/fxpipe`, one package of symlinks, for mypy.

mypy cannot follow the package mapping of pyproject.toml; see MYPYPATH in the Makefile.
"""

import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
TREE = ROOT / ".typing" / "fxpipe"


def main() -> None:
    shutil.rmtree(TREE, ignore_errors=True)
    TREE.mkdir(parents=True)
    for entry in (*(ROOT / "fxpipe").iterdir(), ROOT / "passes", ROOT / "lowering"):
        if entry.name != "__pycache__":
            (TREE / entry.name).symlink_to(entry)


if __name__ == "__main__":
    main()
