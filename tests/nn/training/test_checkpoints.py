"""Checkpoints of one process: whole or absent, whatever becomes of their files."""

from __future__ import annotations

import contextlib
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import meshweave as mw  # noqa: E402
from meshweave.base.errors import CheckpointError, DescriptionError  # noqa: E402
from meshweave.execute.torch import waits  # noqa: E402
from meshweave.nn.training.checkpoints import Checkpoints  # noqa: E402
from meshweave.nn.training.folder import part_name, read_manifest, whole_steps  # noqa: E402
from meshweave.nn.training.manifest import MANIFEST  # noqa: E402
from meshweave.nn.training.pieces import ShardPieces  # noqa: E402
from meshweave.nn.training.state import TrainingState  # noqa: E402

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def with_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests import the package of the example."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def saved(folder: Path, *steps: int, keep: int = 9) -> Checkpoints:
    """Return checkpoints with those of some steps, in which `w` is the number of the step."""
    checkpoints = Checkpoints(folder, keep=keep)
    for step in steps:
        checkpoints.save(step, {"w": torch.full((3, 2), float(step))}, {"said": step})
    checkpoints.wait()
    return checkpoints


def test_what_was_saved_is_loaded_in_place(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 2, 4)
    assert checkpoints.latest() == 4
    value = torch.zeros(3, 2)
    assert checkpoints.load(2, {"w": value}) == {"said": 2}
    assert value.tolist() == [[2.0, 2.0]] * 3


def test_the_oldest_go(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, keep=2)
    assert whole_steps(tmp_path) == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_step_that_is_trained_again_is_saved_again(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, {"w": torch.full((3, 2), -1.0)})
    checkpoints.wait()
    value = torch.zeros(3, 2)
    checkpoints.load(5, {"w": value})
    assert value[0, 0] == -1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


@pytest.mark.parametrize("harm", ["shorter", "gone", "no manifest", "half a manifest", "still in its part"])
def test_a_checkpoint_that_is_cut_short_is_never_loaded(harm: str, tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 2, 4)
    folder = tmp_path / "step-00000004"
    (file,) = (path for path in folder.iterdir() if path.name != MANIFEST)
    harms = {
        "shorter": lambda: file.write_bytes(file.read_bytes()[:-1]),
        "gone": file.unlink,
        "no manifest": (folder / MANIFEST).unlink,
        "half a manifest": lambda: (folder / MANIFEST).write_text('{"step": 4, "fi'),
        "still in its part": lambda: folder.rename(tmp_path / part_name(4)),
    }
    harms[harm]()
    why = "" if harm == "still in its part" else "step 4 in .* is not whole: .*; step 2 is taken"
    with pytest.warns(UserWarning, match=why) if why else contextlib.nullcontext():
        assert checkpoints.latest() == 2
    with pytest.raises(CheckpointError, match=r"whole.*; that of step 2 is whole"):
        checkpoints.load(4, {"w": torch.zeros(3, 2)})
    again = saved(tmp_path, 6)
    assert again.latest() == 6
    assert not (tmp_path / part_name(4)).exists()


def test_a_checkpoint_whose_bytes_changed_is_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    """The size stays, so that it looks whole; no tensor is touched."""
    checkpoints = saved(tmp_path, 1, 2)
    (harmed,) = (path for path in (tmp_path / "step-00000002").iterdir() if path.name != MANIFEST)
    data = bytearray(harmed.read_bytes())
    data[len(data) // 2] ^= 1
    harmed.write_bytes(data)
    value = torch.zeros(3, 2)
    assert checkpoints.latest() == 2
    told = rf"has a file {harmed.name} with other bytes than were written"
    with pytest.raises(CheckpointError, match=f"{told}; that of step 1 is whole"):
        checkpoints.load(2, {"w": value})
    assert not value.any()
    with pytest.warns(UserWarning, match=f"{told}; step 1 is taken"):
        assert checkpoints.latest(checked=True) == 1


def test_files_have_their_checksums_from_those_who_wrote_them(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    folder = tmp_path / "step-00000002"
    manifest = read_manifest(folder)
    assert set(manifest.files) == {path.name for path in folder.iterdir()} - {MANIFEST}
    for name, file in manifest.files.items():
        assert file.crc32 == zlib.crc32((folder / name).read_bytes())


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    with pytest.raises(DescriptionError, match=r"has no tensor 'v'"):
        checkpoints.load(1, {"v": torch.zeros(3, 2)})
    with pytest.raises(DescriptionError, match=r"has 'w' of shape \(3, 2\), and here it is \(3,\)"):
        checkpoints.load(1, {"w": torch.zeros(3)})


def test_optimizer_and_random_states_go_on(tmp_path: Path) -> None:
    def trained(steps: int, *, resumes: int = 0, places: int = 1, rank: int = 0) -> tuple[list[float], float]:
        model = torch.nn.Linear(3, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state = TrainingState([model], optimizer, rank=rank, places=places)
        checkpoints = Checkpoints(tmp_path)
        if resumes:
            optimizer.param_groups[0]["lr"] = 7.0
            assert state.load(checkpoints, resumes) == {"data": 1}
            assert optimizer.param_groups[0]["lr"] == 0.1
        losses = []
        for step in range(resumes + 1, steps + 1):
            optimizer.zero_grad()
            loss = model(torch.rand(4, 3)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step == 3 and not resumes:
                state.save(checkpoints, step, {"data": 1})
        checkpoints.wait()
        return losses, float(torch.rand(()))

    losses, number = trained(6)
    assert trained(6, resumes=3) == (losses[3:], number)
    elsewhere, _ = trained(6, resumes=3, places=2)
    assert elsewhere != losses[3:]
    assert (elsewhere, _) == trained(6, resumes=3, places=2)
    assert (elsewhere, _) == trained(
        6, resumes=3, places=2, rank=1
    )  # which shares the model, and was seeded alike


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 21 windows of 10 bytes and a rest."""
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(bytes(range(217)))
    return path


@given(batch=st.integers(1, 6), before=st.integers(0, 30), count=st.integers(1, 10))
def test_batches_follow_from_the_position(text: Path, batch: int, before: int, count: int) -> None:
    """From any position the same windows come, in batches of whatever size."""
    from gpt_training.text import ByteBatches

    one = ByteBatches(text, sequence=10, batch=1)
    windows = [next(one) for _ in range(before + count * batch)][before:]
    several = ByteBatches(text, sequence=10, batch=batch)
    several.load_state_dict({**several.state_dict(), "position": before})
    rows = torch.cat([next(several)[0] for _ in range(count)])
    assert torch.equal(rows, torch.cat([tokens for tokens, _ in windows]))


def test_an_epoch_has_each_window_once(text: Path) -> None:
    from gpt_training.text import ByteBatches

    data = ByteBatches(text, sequence=10, batch=3)
    epochs = [torch.cat([next(data)[0] for _ in range(7)]) for _ in range(2)]
    starts = [sorted(int(row[0]) for row in epoch) for epoch in epochs]
    assert starts == [list(range(0, 210, 10))] * 2
    assert not torch.equal(*epochs)
    tokens, targets = next(data)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    with pytest.raises(DescriptionError, match="seed 0, these 1"):
        ByteBatches(text, sequence=10, batch=3, seed=1).load_state_dict(data.state_dict())


@given(st.integers(1, 9), st.integers(1, 9))
def test_stages_share_the_layers_out(num_layers: int, num_stages: int) -> None:
    from gpt_training.models import layers_of

    spans = [layers_of(num_layers, number, num_stages) for number in range(num_stages)]
    assert spans[0][0] == 0 and spans[-1][1] == num_layers
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    sizes = [end - first for first, end in spans]
    assert max(sizes) - min(sizes) <= 1


def boxes(whole: Any, *ranges: Any) -> ShardPieces:
    """Return rows of a matrix, given as ranges, as boxes with memory of their own."""
    return ShardPieces(
        tuple(whole.shape), tuple((a, 0) for a, _ in ranges), tuple(whole[a:b].clone() for a, b in ranges)
    )


def test_boxes_are_saved_and_loaded_where_they_are_in_the_whole(tmp_path: Path) -> None:
    """Two of three fused matrices each on one of two ranks; here both are one process."""
    whole, empty = torch.rand(12, 2), torch.zeros(12, 2)
    checkpoints = Checkpoints(tmp_path)
    own = boxes(whole, (8, 12), (0, 2), (4, 6), (2, 4), (6, 8))
    checkpoints.save(1, {"fused": own, "plain": whole})
    for tensor in own.tensors:
        tensor.zero_()  # it was copied
    checkpoints.wait()
    fused, plain = empty.clone(), boxes(empty, (3, 7), (9, 10), (1, 2))
    checkpoints.load(1, {"fused": fused, "plain": plain})
    assert torch.equal(fused, whole)
    assert all(map(torch.equal, plain.tensors, (whole[3:7], whole[9:10], whole[1:2])))
    with pytest.raises(DescriptionError, match=r"has 'fused' of shape \(12, 2\), and here it is \(11, 2\)"):
        checkpoints.load(1, {"fused": boxes(empty[:11], (0, 2))})


def test_a_plan_with_the_overlap_of_whole_layers_is_taken_only_where_it_is_accepted(tmp_path: Path) -> None:
    from gpt_training.layout import parallelism_of_plan

    path = tmp_path / "plan.json"
    options = {
        "batch": 8,
        "sequence": 512,
        "tp": 2,
        "strategy": "megatron_sp",
        "zero": 0,
        "recompute": "none",
    }
    for overlap in ("layers", "sites"):
        mw.plan("llama-3-8b", "dgx-h100:2", overlap=overlap, memory_bytes=1 << 40, **options).save(path)
        if overlap == "layers":
            with pytest.raises(
                mw.errors.PlanError, match=r"plan without --overlap layers, or give --accept-sites"
            ):
                parallelism_of_plan(path, 2)
        assert parallelism_of_plan(path, 2, accepts_sites=overlap == "layers").tensor == 2


@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_stages_one_after_another_are_the_model(style: str) -> None:
    from gpt_training.models import ModelSize, build, stage_of

    size = ModelSize(style, 3, 8, 2, 2 if style == "gpt" else 1, 16, sequence=5)
    model = build(size)
    stages = [stage_of(model, number, 2) for number in range(2)]
    names = [name for stage in stages for name in stage.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    tokens = torch.arange(10).view(2, 5)
    assert torch.equal(stages[1](stages[0](tokens)), model(tokens))


def test_a_run_in_a_call_counts_its_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(waits.time, "monotonic_ns", lambda: now[0] * 10**9)

    def passes(seconds: int) -> None:
        now[0] += seconds

    clock = waits.WaitClock()
    product = clock.around_compute(lambda: passes(5))

    def inside() -> None:
        passes(2)  # a wait in the program that a call runs
        product()

    call = clock.around_compute(clock.around_run(inside))

    def outside() -> None:
        passes(3)
        call()

    clock.around_run(outside)()
    assert (clock.waits_s, clock.num_runs) == (5, 2)
