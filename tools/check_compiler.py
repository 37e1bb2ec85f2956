"""The machine -> an exit status: whether torch's compiler can build code for the CPU here."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def main() -> str | None:
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if not any(map(shutil.which, compilers)):
        return f"no C++ compiler found ({', '.join(compilers)}); install g++, or set CXX"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        return f"no Python.h found in {headers}; install Python's headers (Debian: python3-dev)"
    return None


if __name__ == "__main__":
    sys.exit(main())
