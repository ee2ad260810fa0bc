"""What the training example refuses in one line: options that no training can have, and texts that are none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.base.errors import DescriptionError, LayoutError

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def with_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests import the example."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--resume"], "name its folder with --folder"),
        (["--kv-heads", "2"], "a gpt has as many heads of keys and values as of queries, 4"),
        (["--model", "llama", "--kv-heads", "3"], "each is to divide the next larger one"),
        (["--hidden", "30"], "each is to divide the next larger one"),
        (["--model", "llama", "--hidden", "36"], "an even width, and not 9"),
        (["--heads", "0"], "num_heads is 0; give at least 1"),
        (["--sequence", "0"], "sequence is 0; give at least 1"),
    ],
)
def test_options_that_fit_no_model(options: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import train_gpt

    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *options])
    given = train_gpt.arguments()
    with pytest.raises(DescriptionError, match=said):
        train_gpt.options_of(given, 1)


def test_a_batch_has_a_row() -> None:
    from gpt_training.trainer import Trainer, TrainOptions

    trainer = object.__new__(Trainer)
    trainer.options = TrainOptions(batch=0)
    with pytest.raises(LayoutError, match="a batch of 0 has no whole number of micro-batches"):
        _ = trainer.num_micro_batches


@pytest.mark.parametrize(
    ("name", "raw"), [("none", None), ("text.gz", b"plain"), ("text.gz", b"\x1f\x8b\x08\x00")]
)
def test_a_text_that_cannot_be_read(tmp_path: Path, name: str, raw: bytes | None) -> None:
    from gpt_training.text import ByteBatches

    path = tmp_path / name
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(DescriptionError, match=f"{name} cannot be read as a text"):
        ByteBatches(path, sequence=4, batch=1)
