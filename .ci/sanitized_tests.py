"""Runs pytest on the sanitized core of a folder; fails if another core is loaded; `.ci/sanitize` starts it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest


def main(site: str, *arguments: str) -> int:
    core = importlib.import_module("meshweave._core")
    path = Path(core.__file__ or "?").resolve()
    if not path.is_relative_to(Path(site).resolve()):
        sys.exit(f"sanitize: loaded {path}, which is not the core built under {site}")
    code = path.read_bytes()
    if b"__asan_init" not in code or b"__ubsan_handle" not in code:
        sys.exit(f"sanitize: {path} was built without sanitizers")
    if "libasan" not in Path("/proc/self/maps").read_text():
        sys.exit("sanitize: libasan is not loaded")
    print(f"sanitize: pytest {' '.join(arguments)}\nsanitize: on {path}", flush=True)
    status = int(pytest.main(list(arguments)))
    if sys.modules.get("meshweave._core") is not core:
        sys.exit("sanitize: a test replaced the sanitized core")
    print(f"sanitize: {'passed' if status == 0 else 'FAILED'}, address and undefined behaviour, {path.name}")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
