"""Builds the native libraries (csrc/) beside the package, if a C++ compiler is there; else installs without them.

    csrc/*.cpp      --one object each, with flags of its own--> zeroshard/optim/host/libzeroshard_host.so
    csrc/disk/*.cpp --one object each--> zeroshard/nvme/libzeroshard_disk.so
    csrc/codes/*.cpp --one object--> zeroshard/engine/memory/libzeroshard_codes.so

All else about the package is in pyproject.toml. setuptools would give every file of an extension the same flags, but
each instruction set needs its own; and the library is plain C, so that its name and content know nothing of a version
of Python. Several libraries, so that the kernels are there where the system calls of another are not. Rejected:
scikit-build-core with CMake, which refuses to install where no compiler is.
"""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HOST, DISK = "zeroshard.optim.host.libzeroshard_host", "zeroshard.nvme.libzeroshard_disk"
CODES = "zeroshard.engine.memory.libzeroshard_codes"
# No contraction to fused multiply-add: all instruction sets must give the same bits.
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fno-rtti"]
FLAGS += ["-fvisibility=hidden", "-pthread", "-g0"]
AVX2 = ["-mavx2", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
# gcc 12 takes its own intrinsics for uses of uninitialized values.
QUIET = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
KERNELS: dict[str, list[str]] = {
    "csrc/library.cpp": [],
    "csrc/pool.cpp": [],
    "csrc/kernels_plain.cpp": [],
}
if platform.machine() in ("x86_64", "AMD64"):
    KERNELS["csrc/kernels_avx2.cpp"] = AVX2
    KERNELS["csrc/kernels_avx512.cpp"] = [*AVX2, *AVX512, *QUIET]
elif platform.machine() in ("aarch64", "arm64"):
    KERNELS["csrc/kernels_neon.cpp"] = []


SOURCES: dict[str, dict[str, list[str]]] = {
    HOST: KERNELS,
    CODES: {"csrc/codes/codes.cpp": []},
    DISK: {f"csrc/disk/{name}.cpp": [] for name in ("library", "ring", "threads", "transfer")},
}


class BuildLibrary(build_ext):
    """Compiles each source of a library with its own flags, several at once."""

    def get_ext_filename(self, fullname: str) -> str:
        """The library's path in the package, without the tag of a Python version."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        sources = SOURCES[ext.name]

        def compiled(source: str) -> list[str]:
            return self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=[*FLAGS, *sources[source]], depends=ext.depends
            )

        with ThreadPoolExecutor() as pool:
            objects = [name for names in pool.map(compiled, sources) for name in names]
        self.compiler.link_shared_object(
            objects, str(target), extra_postargs=["-pthread"], target_lang="c++", build_temp=self.build_temp
        )


HEADERS = [str(path) for path in Path("csrc").rglob("*.hpp")]
setup(
    # optional: a machine without a compiler gets the package without the libraries, and pip says so.
    ext_modules=[Extension(name, sorted(sources), depends=HEADERS, optional=True) for name, sources in SOURCES.items()],
    cmdclass={"build_ext": BuildLibrary},
)
