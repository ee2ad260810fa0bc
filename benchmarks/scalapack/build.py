"""Builds the ScaLAPACK rival: `python benchmarks/scalapack/build.py`.

Needs MPICH, ScaLAPACK built for it, and OpenBLAS. On Debian and Ubuntu:

    apt-get install gcc mpich libmpich-dev libscalapack-mpich-dev libopenblas0-serial

Linked is OpenBLAS itself, whatever `libblas.so.3` stands for on the machine; each rank runs it with one thread.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PROGRAM = FOLDER / "build" / "pgemm"
PACKAGES = "gcc mpich libmpich-dev libscalapack-mpich-dev libopenblas0-serial"
_COMPILERS = ("mpicc.mpich", "mpicc")
_BLAS = ("-lopenblas", "-l:libopenblas.so.0")  # with the development package, and without
TIMEOUT_S = 120.0


class BuildError(RuntimeError):
    """The rival cannot be built here; says what is missing."""


def build() -> Path:
    """The program, compiled if it is not there or older than its source. Raises BuildError."""
    sources = [FOLDER / "pgemm.c", FOLDER / "yield.c"]
    if PROGRAM.exists() and PROGRAM.stat().st_mtime > max(source.stat().st_mtime for source in sources):
        return PROGRAM
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no MPI compiler; on Debian: apt-get install {PACKAGES}")
    PROGRAM.parent.mkdir(exist_ok=True)
    said = ""
    for blas in _BLAS:
        # OpenBLAS comes first and is kept, so that ScaLAPACK's calls find it before `libblas.so.3`.
        libraries = ["-rdynamic", "-Wl,--no-as-needed", blas, "-lscalapack-mpich", "-ldl"]
        command = [compiler, "-O2", "-Wall", "-Wextra", "-o", str(PROGRAM), *map(str, sources), *libraries]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode == 0:
            return PROGRAM
        said = done.stderr.strip()
    raise BuildError(f"{said}\ndoes not build; on Debian: apt-get install {PACKAGES}")


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as error:
        sys.exit(str(error))
