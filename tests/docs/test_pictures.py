"""Pictures of the guide are what the command next to them draws."""

from __future__ import annotations

from pathlib import Path

from meshweave.cli.app import run_app

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


def test_eager_1f1b_beside_1f1b(tmp_path: Path) -> None:
    drawn = tmp_path / "eager.svg"
    sizes = ["--stages", "4", "--micro-batches", "8", "--transfer", "0.4ms"]
    assert run_app(["pipeline", "1f1b", *sizes, "--beside", "eager-1f1b", "--svg", str(drawn)]) == 0
    assert drawn.read_text(encoding="utf-8") == (PICTURES / "eager-1f1b.svg").read_text(encoding="utf-8")
