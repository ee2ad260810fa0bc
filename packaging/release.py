"""Give the three distributions a version, in the one place where each file says it, and their changes a heading.

    python packaging/release.py 0.2.0

What is given is written to `meshweave.__version__`, to the three `pyproject.toml`, and to the exact needs of the
lab and the studies; what stands under "Unreleased" in CHANGELOG.md gets the version and the day.
"""

from __future__ import annotations

import argparse
import re
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = {
    "src/meshweave/__init__.py": r'(?m)^(__version__ = ")[^"]+',
    "pyproject.toml": r'(?m)^(version = ")[^"]+',
    "lab/pyproject.toml": r'(?m)^(version = "|dependencies = \["meshweave==)[^"]+',
    "studies/pyproject.toml": r'(?m)^(version = "|dependencies = \["meshweave==)[^"]+',
}
"""Files, and what in them has a version behind it."""


def main() -> None:
    """Release the version that the command line gives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="as 0.2.0")
    release(ROOT, parser.parse_args().version, datetime.now(UTC).date().isoformat())


def release(root: Path, version: str, day: str) -> None:
    """Write a version into the files of a checkout. Ends the program where it is none, or a file says none."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise SystemExit(f"'{version}' is no version; give one as 0.2.0 or 0.2.0rc1")
    texts = {name: (root / name).read_text() for name in (*PLACES, "CHANGELOG.md")}
    for name, pattern in PLACES.items():
        texts[name], count = re.subn(pattern, rf"\g<1>{version}", texts[name])
        if count != pattern.count("|") + 1:
            raise SystemExit(f"{name}: {count} versions found")
    head = "## Unreleased\n"
    if texts["CHANGELOG.md"].count(head) != 1 or f"\n## {version} " in texts["CHANGELOG.md"]:
        raise SystemExit(f"CHANGELOG.md: it has {version}, or not one heading 'Unreleased'")
    texts["CHANGELOG.md"] = texts["CHANGELOG.md"].replace(head, f"{head}\n## {version} ({day})\n")
    for name, text in texts.items():
        (root / name).write_text(text)


if __name__ == "__main__":
    main()
