"""What may go wrong while a training saves: kills, slow and full disks, rewinds, two jobs, other models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from meshweave.base.errors import CheckpointError  # noqa: E402
from meshweave.execute.ranks.launch import launch  # noqa: E402
from meshweave.nn.training.checkpoints import Checkpoints  # noqa: E402
from meshweave.nn.training.folder import whole_steps  # noqa: E402
from meshweave.nn.training.state import TrainingState  # noqa: E402

HERE = Path(__file__).parent


def saved(folder: Path, *steps: int, keep: int = 9) -> Checkpoints:
    """Return checkpoints with those of some steps, in which `w` is the number of the step."""
    checkpoints = Checkpoints(folder, keep=keep)
    for step in steps:
        checkpoints.save(step, {"w": torch.full((3,), float(step))})
    checkpoints.wait()
    return checkpoints


@pytest.mark.parametrize(
    ("num_random", "stride", "least"), [(0, 67, 4), pytest.param(25, 1, 300, marks=pytest.mark.slow)]
)
def test_no_kill_loses_a_whole_step_or_a_bit(
    num_random: int, stride: int, least: int, tmp_path: Path
) -> None:
    """At each thing that a save does to the file system, and at random: the training goes on, bit for bit."""
    command = [sys.executable, str(HERE / "kill_points.py"), str(tmp_path), "1", str(num_random), str(stride)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout)
    assert said["wrong"] == []
    assert said["killed"] >= least and min(said["points"].values()) > 20


@pytest.mark.gloo
def test_faults_of_one_rank_reach_all(tmp_path: Path) -> None:
    answers = launch(
        "checkpoint_rank_functions:faults",
        2,
        {"folder": str(tmp_path)},
        timeout_s=400,
        deadline_s=100,
        stale_s=8.0,
        env={"PYTHONPATH": str(HERE)},
    )
    told, others = answers
    assert told == others
    assert "File exists" in told["a file"] and told["a file in time"]
    assert "FileExistsError" in told["weights"]
    assert told["slow 0"] and told["slow 1"]
    assert (
        "the checkpoint of step 2 was not saved: rank 1: " in told["no room"]
        and "File too large" in told["no room"]
    )
    assert told["after no room"] == [1, ["step-00000001"]]
    assert told["again"] == 3
    assert "rank 0 save step 4" in told["steps"] and "rank 1 save step 5" in told["steps"]
    assert "with notes" in told["notes"]
    assert "'x' is float32 of shape (1,) on one rank, float32 of shape (2,) on rank 1" in told["shape"]
    assert "'x' is a list, and a checkpoint takes tensors" in told["kind"]
    assert told["left"] == ["step-00000001", "step-00000003"]
    assert "has no tensor 'more'" in told["missing"]
    assert "has 'both', which nothing here takes" in told["extra"]
    assert told["allowed"] == ""
    assert "the checkpoint of step 5 was not saved" in told["deleted"]
    assert told["made again"] == 6


def test_a_rewind_keeps_what_is_saved_next(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30, 40)
    rewound = Checkpoints(tmp_path, keep=2)
    rewound.load(10, {"w": torch.zeros(3)})
    rewound.save(11, {"w": torch.ones(3)})
    rewound.wait()
    assert rewound.latest() == 11
    assert whole_steps(tmp_path) == [10, 11]  # what 11 descends from, and not what it has replaced
    rewound.save(12, {"w": torch.ones(3)})
    rewound.wait()
    assert whole_steps(tmp_path) == [11, 12]


def test_the_last_saved_is_the_latest_while_later_steps_stay(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20, 30, 40)
    rewound = Checkpoints(tmp_path, keep=9)
    rewound.load(20, {"w": torch.zeros(3)})
    rewound.save(25, {"w": torch.ones(3)})
    assert rewound.latest() == 25
    assert whole_steps(tmp_path) == [10, 20, 25, 30, 40]
    assert Checkpoints(tmp_path).latest() == 25


@pytest.mark.parametrize("step", [-5, True, 1.0, 10**15, 10**400, None, "7"])
def test_what_is_no_step_is_refused(step: Any, tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    for act in (
        lambda: checkpoints.save(step, {}),
        lambda: checkpoints.load(step, {}),
        lambda: checkpoints.notes(step),
    ):
        with pytest.raises(CheckpointError, match="a step is an integer"):
            act()
    assert whole_steps(tmp_path) == [1]


@pytest.mark.parametrize(
    "notes", [{"a": {1, 2}}, {"a": 1j}, {"a": 10**5000}, {1: "a", "1": "b"}, {"a": b"x"}]
)
def test_notes_that_json_has_not_are_refused_at_once(notes: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the notes are no JSON"):
        Checkpoints(tmp_path).save(1, {}, notes)


def test_notes_may_have_what_python_reads_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {}, {"best": float("inf"), "text": "\n[{,é", "deep": [[[[1]]]]})
    assert checkpoints.notes(1) == {"best": float("inf"), "text": "\n[{,é", "deep": [[[[1]]]]}


@pytest.mark.parametrize(
    ("there", "here", "casts", "words"),
    [
        (torch.float32, torch.int64, False, "is float32, and here|of float32, and here it is int64$"),
        (torch.float32, torch.int64, True, "of float32, and here it is int64$"),
        (torch.float32, torch.bfloat16, False, "here it is bfloat16; casts=True loads it"),
        (torch.float32, torch.bfloat16, True, ""),
        (torch.bfloat16, torch.float64, True, ""),
        (torch.int64, torch.int32, True, "of int64, and here it is int32$"),
        (torch.bool, torch.uint8, True, "of bool, and here it is uint8$"),
        (torch.complex64, torch.complex64, False, ""),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, False, ""),
        (torch.uint16, torch.uint16, False, ""),
    ],
    ids=str,
)
def test_dtypes_change_where_that_is_asked_for(
    there: torch.dtype, here: torch.dtype, casts: bool, words: str, tmp_path: Path
) -> None:
    checkpoints, values = Checkpoints(tmp_path), torch.tensor([[0.0, 1.0], [0.5, -2.0]]).abs().to(there)
    checkpoints.save(1, {"w": values})
    target = torch.zeros(2, 2).to(here)
    if words:
        with pytest.raises(CheckpointError, match=words):
            checkpoints.load(1, {"w": target}, casts=casts)
    else:
        checkpoints.load(1, {"w": target}, casts=casts)
        assert target.tolist() == values.to(here).tolist()


def test_larger_than_the_scratch_buffer_and_in_strides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("meshweave.nn.training.files._SLICE_BYTES", 64)
    monkeypatch.setattr("meshweave.nn.training.files._SYNC_BYTES", 256)
    checkpoints, whole = Checkpoints(tmp_path), torch.arange(3.0 * 40 * 5).view(3, 40, 5)
    checkpoints.save(
        1, {"w": whole, "t": whole.transpose(0, 2), "none": torch.zeros(0, 4), "one": torch.tensor(7)}
    )
    loaded = {
        "w": torch.zeros(5, 40, 3).permute(2, 1, 0),
        "t": torch.zeros(5, 40, 3),
        "none": torch.zeros(0, 4),
    }
    loaded["one"] = torch.tensor(0)
    checkpoints.load(1, loaded)
    assert torch.equal(loaded["w"], whole) and torch.equal(loaded["t"], whole.transpose(0, 2))
    assert loaded["one"] == 7
    wide = torch.zeros(3, 40, 5, dtype=torch.float64)
    checkpoints.load(1, {"w": wide}, casts=True, extra=True)
    assert torch.equal(wide, whole.double())


def test_a_checkpoint_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    def model(layers: int) -> tuple[torch.nn.Module, TrainingState]:
        made = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers)))
        return made, TrainingState([made], torch.optim.SGD(made.parameters(), lr=0.1), rank=0)

    checkpoints = Checkpoints(tmp_path)
    model(2)[1].save(checkpoints, 1)
    one, state = model(1)
    before = one[0].weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"has 'model.1.weight' and 1 more, which nothing here takes"):
        state.load(checkpoints, 1)
    assert torch.equal(one[0].weight, before)
    state.load(checkpoints, 1, extra=True)
    assert not torch.equal(one[0].weight, before)


def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    script = (
        "import sys, torch, meshweave as mw; c = mw.Checkpoints(sys.argv[1]); c.save(1, {'w': torch.ones(3)}); "
        "c.wait(); print('saved', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None and job.stdout.readline() == "saved\n"
        other = Checkpoints(tmp_path)
        value = torch.zeros(3)
        other.load(1, {"w": value})  # whoever only reads is no job
        assert value.sum() == 3
        with pytest.raises(
            CheckpointError, match=rf"process {job.pid} .* saves into .*; give each job a folder"
        ):
            other.save(2, {"w": value})
        job.kill()
    other.save(2, {"w": value})
    other.wait()
    assert other.latest() == 2


@pytest.mark.parametrize("kind", ["adamw", "sgd", "momentum", "adagrad"])
def test_a_training_goes_on_from_before_its_first_step(kind: str, tmp_path: Path) -> None:
    def trained(begins_at: int | None) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = {
            "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.1),
            "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1),
            "momentum": lambda: torch.optim.SGD(
                model.parameters(), lr=torch.tensor(0.1), momentum=0.9, dampening=0.5
            ),
            "adagrad": lambda: torch.optim.Adagrad(model.parameters(), lr=0.1),
        }[kind]()
        state, checkpoints = TrainingState([model], optimizer, rank=0), Checkpoints(tmp_path, keep=9)
        if begins_at is not None:
            for _ in range(2):  # of which nothing may stay
                model(torch.rand(4, 3)).square().mean().backward()
                optimizer.step()
            optimizer.param_groups[0]["lr"] = torch.tensor(7.0) if kind == "momentum" else 7.0
            state.load(checkpoints, begins_at)
        losses = []
        for step in range(begins_at or 0, 4):
            if begins_at is None:
                state.save(checkpoints, step)
            optimizer.zero_grad()
            loss = model(torch.rand(4, 3)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        checkpoints.wait()
        return losses

    losses = trained(None)
    assert trained(0) == losses
    assert trained(2) == losses[2:]


def test_a_refused_checkpoint_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    state = TrainingState([model], torch.optim.SGD(model.parameters(), momentum=0.9), rank=0)
    model(torch.rand(4, 3)).sum().backward()
    state._optimizer.step()
    checkpoints = Checkpoints(tmp_path)
    state.save(checkpoints, 1)
    other = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(other.parameters(), momentum=0.9)
    with pytest.raises(CheckpointError, match="casts=True"):
        TrainingState([other], optimizer, rank=0).load(checkpoints, 1)
    assert not optimizer.state
    TrainingState([other], optimizer, rank=0).load(checkpoints, 1, casts=True)
    assert len(optimizer.state) == 2


def test_what_a_tensor_cannot_hold_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for value, words in (
        (torch.zeros(3, device="meta"), "on the meta device"),
        (torch.zeros(3).to_sparse(), "dense"),
        ({"a": 1}, "is a dict, and a checkpoint takes tensors"),
    ):
        with pytest.raises(CheckpointError, match=words):
            checkpoints.save(1, {"w": value})
    for act in (checkpoints.save, saved(tmp_path / "other", 1).load):
        with pytest.raises(CheckpointError, match="7 is no name of a tensor"):
            act(1, {7: torch.zeros(1)})
    assert whole_steps(tmp_path) == []


def test_a_checkpoint_of_the_earlier_format_says_how_it_is_converted(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000003"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"\x80\x04.")
    text = json.dumps({"step": 3, "files": {".metadata": 3}, "checksums": {}, "notes": {}})
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"earlier format.*\(checkpoints.md\)"):
        Checkpoints(tmp_path).load(3, {})
    with pytest.raises(CheckpointError, match=r"earlier format.*no other checkpoint there is whole"):
        Checkpoints(tmp_path).latest()


def test_the_guide_converts_the_earlier_format(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    guide = (HERE.parents[2] / "docs" / "guide" / "checkpoints.md").read_text()
    snippet = guide.partition("import json, tempfile, torch\n")[2].partition("```")[0]
    folder = tmp_path / "out" / "step-00000050"
    tensors = {"model.a.weight": torch.rand(3, 2), "optimizer.a.weight.step": torch.tensor(50.0)}
    dcp.save(dict(tensors), checkpoint_id=folder, no_dist=True)
    text = json.dumps({"step": 50, "files": {}, "checksums": {}, "notes": {"said": 1}})
    (folder / "manifest.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    exec("import json, tempfile, torch\n" + snippet, {})
    loaded = {name: torch.zeros_like(each) for name, each in tensors.items()}
    assert Checkpoints("converted").load(50, loaded) == {"said": 1}
    assert all(torch.equal(loaded[name], each) for name, each in tensors.items())
