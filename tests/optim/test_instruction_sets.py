"""Every instruction set gives the bits of plain C++, and NEON under an emulator those of this processor.

`instruction_sets.cpp` compares them; its hash of all results must not depend on the architecture. NEON is compiled by
zig (`pip install ziglang`) and run by qemu-aarch64-static (Debian's qemu-user-static), where both are there.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.cases import only_with_all_cases

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "optim" / "instruction_sets.cpp"
COMMON = ["library", "pool", "kernels_plain"]
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-pthread", "-I", "csrc"]
AVX2 = ["-mavx2", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-w"]
EMULATOR = "qemu-aarch64-static"


def _run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _compared(output: str) -> tuple[list[str], str]:
    """The sets that took part and the hash of their results; nothing may have differed."""
    found = re.search(r"sets: (.*)\ncompared (\d+), different 0, hash (\w+)", output)
    assert found is not None, output
    assert int(found[2]) > 1_000_000
    return found[1].split(), found[3]


def _here(folder: Path) -> tuple[list[str], str]:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    own = {"x86_64": {"kernels_avx2": AVX2, "kernels_avx512": AVX512}, "aarch64": {"kernels_neon": []}}
    objects: list[str] = []
    for name, flags in {**{name: [] for name in COMMON}, **own.get(platform.machine(), {})}.items():
        objects.append(str(folder / f"{name}.o"))
        _run([compiler, *FLAGS, *flags, "-c", f"csrc/{name}.cpp", "-o", objects[-1]])
    _run([compiler, *FLAGS, str(PROGRAM), *objects, "-o", str(folder / "here")])
    return _compared(_run([str(folder / "here")]))


@only_with_all_cases
def test_all_sets_of_this_processor_give_the_bits_of_plain_code(tmp_path: Path) -> None:
    sets, _ = _here(tmp_path)
    assert sets[-1] == "plain"
    assert len(sets) > 1 or platform.machine() not in ("x86_64", "aarch64")


@only_with_all_cases
def test_neon_gives_the_bits_of_plain_code_and_of_this_processor(tmp_path: Path) -> None:
    emulator = shutil.which(EMULATOR)
    if emulator is None or find_spec("ziglang") is None:
        pytest.skip(f"needs ziglang and {EMULATOR}")
    sources = [f"csrc/{name}.cpp" for name in (*COMMON, "kernels_neon")]
    target = ["-target", "aarch64-linux-musl", "-static", "-o", str(tmp_path / "neon")]
    _run([sys.executable, "-m", "ziglang", "c++", *FLAGS, *sources, str(PROGRAM), *target])
    sets, found = _compared(_run([emulator, str(tmp_path / "neon")]))
    assert sets == ["neon", "plain"]
    assert found == _here(tmp_path)[1]
