"""`python -m benchmarks` (or `make bench`): every benchmark, each as a command of its own, one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    worst = 0
    for script in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        print(f"\n== {script.stem}", flush=True)
        worst = max(worst, abs(subprocess.run([sys.executable, str(script), *sys.argv[1:]]).returncode))
    return worst


if __name__ == "__main__":
    sys.exit(main())
