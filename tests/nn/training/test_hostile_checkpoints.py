"""What is damaged or made to hurt is refused in one line, runs nothing, and takes neither memory nor time."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from hostile_checkpoints import HARMS, harmed_checkpoint  # noqa: E402

from meshweave.base.errors import CheckpointError  # noqa: E402
from meshweave.execute.ranks.launch import launch  # noqa: E402
from meshweave.nn.training.checkpoints import Checkpoints  # noqa: E402
from meshweave.nn.training.state import TrainingState  # noqa: E402

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
NUM_CASES = 12 * len(HARMS)
MAX_GROWTH_KIB = 700 << 10
"""What the largest text under the limits takes once it is parsed."""


def tensors_of(step: float) -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes, which `step` determines."""
    return {
        "w": torch.full((3, 2), step),
        "b": torch.arange(5.0, dtype=torch.float64) + step,
        "n": torch.tensor(int(step)),
        "mask": torch.tensor([True, False, True]),
        "half": torch.full((4,), step, dtype=torch.bfloat16),
    }


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("pristine") / "checkpoints"
    checkpoints = Checkpoints(folder)
    for step in (2, 4):
        checkpoints.save(step, tensors_of(float(step)), {"said": step})
    checkpoints.wait()
    return folder


@pytest.mark.parametrize("seed", range(2 * len(HARMS)))
def test_it_is_refused_in_one_line_and_nothing_is_touched(seed: int, pristine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in" / "checkpoints"
    harm = harmed_checkpoint(pristine, folder, seed)
    checkpoints, values = Checkpoints(folder), tensors_of(9.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises(CheckpointError) as refused:
        checkpoints.load(4, values)
    words = str(refused.value)
    assert "\n" not in words and "checkpoint" in words and len(words) < 900, harm
    assert not (tmp_path / "in" / "canary").exists() and not (tmp_path / "canary").exists(), harm
    if "have been read" not in words:
        assert all(torch.equal(each, values[name]) for name, each in tensors_of(9.0).items()), harm
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB, harm
    assert time.process_time() - start < 12, harm
    checkpoints.load(2, values)
    assert all(torch.equal(each, values[name]) for name, each in tensors_of(2.0).items()), harm


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_so_are_hundreds_on_all_ranks(tmp_path: Path) -> None:
    """Saved by two ranks, harmed, and read by two: both refuse in the same words."""
    answers = launch(
        "checkpoint_rank_functions:loads_harmed_ones",
        2,
        {"folder": str(tmp_path), "num_cases": NUM_CASES},
        timeout_s=1700,
        deadline_s=100,
        stale_s=8.0,
        env=HERE,
    )
    for (case, words), (_, others) in zip(*answers, strict=True):
        assert words == others, case
        assert words and "\n" not in words and "step 4" in words, (case, words)
    assert len(answers[0]) == NUM_CASES >= 200
    assert not list(tmp_path.glob("**/canary"))


def test_settings_of_an_optimizer_that_are_none_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState([model], optimizer, rank=0)
    checkpoints = Checkpoints(tmp_path)
    for number, notes in enumerate(
        (
            {},
            {"training": [], "notes": {}},
            {"training": {"groups": [{"params": []}]}, "notes": {}},
            {"training": {"groups": [{"lr": {}}]}, "notes": {}},
            {"training": {"groups": 1}, "notes": {}},
            *({"training": {"groups": [{}], "members": each}, "notes": {}} for each in (1, [], [1], [[1]])),
        )
    ):
        checkpoints.save(number, {f"model.{name}": each for name, each in model.state_dict().items()}, notes)
        with pytest.raises(
            CheckpointError, match=r"not saved by a TrainingState|no settings|no lists of names"
        ):
            state.load(checkpoints, number)
        assert optimizer.param_groups[0]["params"]
