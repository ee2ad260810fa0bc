"""Weights of safetensors files into modules of any layout, and back."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
pytest.importorskip("safetensors", reason="safetensors is not installed")
from safetensors.torch import save_file  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402

from meshweave.base.errors import (  # noqa: E402
    BindError,
    CheckpointError,
    DescriptionError,
    LayoutError,
    MeshweaveError,
    RankLostError,
)
from meshweave.execute.ranks.launch import RankError, launch  # noqa: E402
from meshweave.nn.weights import StoredTensor, load_weights, save, save_weights  # noqa: E402
from meshweave.nn.weights.pretrained import bytes_of  # noqa: E402

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
ONES = torch.ones(2, 2)


@pytest.mark.gloo
def test_each_rank_reads_its_part_and_together_they_write_the_same(tmp_path: Path) -> None:
    shapes = {
        "h.even": (8, 6), "uneven": (3, 7), "fused": (4, 12), "copies": (2, 3), "h.turned": (5, 6), "extra": (2,),
    }  # fmt: skip
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    names = list(tensors)
    files = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, group in files.items():
        save_file({name: tensors[name] for name in group}, tmp_path / file)
    weight_map = {name: file for file, group in files.items() for name in group}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    results = launch(
        "weights_rank_functions:load_and_save", 4, {"folder": str(tmp_path)}, timeout_s=180, env=HERE
    )
    assert [wrong for wrong, _ in results] == [[]] * 4
    assert len({rank for rank, (_, written) in enumerate(results) if written}) > 1  # files, by turns
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(set(names) - {"extra"})
    assert index["metadata"]["total_size"] == 4 * sum(
        torch.Size(shapes[n]).numel() for n in index["weight_map"]
    )
    assert not list((tmp_path / "again").glob(".*"))


def test_files_are_on_the_disk_before_they_have_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        done.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        sync(descriptor)

    def replaced(path: Path, target: Path) -> Path:
        done.append(f"name {path.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    written = save_weights(torch.nn.Linear(8, 8), tmp_path, file_bytes=100)
    assert len(written) == 2
    for name in (*(path.name for path in written), "model.safetensors.index.json"):
        assert done.index(f"sync .{name}.partial") < done.index(f"name .{name}.partial")
    assert done[-1] == f"sync {tmp_path.name}"


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 5)
    save_file({"weight": torch.ones(3, 5), "bias": torch.ones(5)}, tmp_path / "model.safetensors")
    with pytest.raises(
        LayoutError, match=r"stored transposed: map it to StoredTensor\('weight', is_transposed=True\)"
    ):
        load_weights(module, tmp_path)
    load_weights(module, tmp_path, mapping={"weight": StoredTensor("weight", is_transposed=True)})
    assert bool((module.weight == 1).all())
    with pytest.raises(DescriptionError, match=r"1 tensors are missing, 0\.bias"):
        load_weights(
            torch.nn.Sequential(module), tmp_path, mapping={"0.weight": StoredTensor("weight", True)}
        )
    with pytest.raises(DescriptionError, match="no safetensors here"):
        load_weights(module, tmp_path / "nowhere")
    module.bias = torch.nn.Parameter(torch.ones(5, dtype=torch.int64), requires_grad=False)
    with pytest.raises(LayoutError, match=r"bias is torch.int64, and bias of .* torch.float32"):
        load_weights(module, tmp_path, mapping={"weight": StoredTensor("weight", is_transposed=True)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "../model.safetensors"}}))
    with pytest.raises(
        DescriptionError, match=r"names the file '../model.safetensors', and its files lie beside it"
    ):
        load_weights(module, tmp_path)


def test_damaged_files_are_refused_in_words(tmp_path: Path) -> None:
    """Files that are torn, empty, altered or of another model: whatever does not load says what is wrong."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    save_weights(module, tmp_path, file_bytes=200)
    whole = {path: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    draw, refused = random.Random(20261128), 0
    for _ in range(300):
        path = draw.choice(list(whole))
        data = bytearray(whole[path])
        match draw.randrange(4):
            case 0:
                del data[draw.randrange(len(data)) :]
            case 1:
                data[draw.randrange(min(len(data), 300))] = draw.randrange(256)
            case 2:
                data = bytearray(whole[draw.choice(list(whole))])
            case 3:
                data = bytearray(bytes(data).replace(b"weight", b"wright", 1))
        path.write_bytes(data)
        try:
            load_weights(copy.deepcopy(module), tmp_path)
        except MeshweaveError as error:
            assert str(tmp_path) in str(error) or "stored" in str(error), error
            refused += 1
        path.write_bytes(whole[path])
    assert refused > 150
    load_weights(module, tmp_path)


def test_files_of_an_earlier_checkpoint_are_not_read_again(tmp_path: Path) -> None:
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    assert len(save_weights(first, tmp_path, file_bytes=100)) == 2
    save_weights(second, tmp_path)
    other = torch.nn.Linear(8, 8)
    load_weights(other, tmp_path)
    assert torch.equal(other.weight, second.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    save_weights(first, tmp_path, file_bytes=100)
    load_weights(other, tmp_path)
    assert torch.equal(other.weight, first.weight) and len([*tmp_path.iterdir()]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("style", ["GPT2", "Llama"])
def test_hugging_face_reads_what_was_saved_and_is_read(
    tmp_path: Path, style: str, is_tied: bool, is_sharded: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16},
        "Llama": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 32,
        },
    }[style]  # fmt: skip
    config = getattr(transformers, f"{style}Config")(**sizes, tie_word_embeddings=is_tied)
    model_class = getattr(transformers, f"{style}LMHeadModel" if style == "GPT2" else f"{style}ForCausalLM")
    model, other = model_class(config).eval(), model_class(config).eval()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="4KB" if is_sharded else "1GB")
    assert (tmp_path / "theirs" / "model.safetensors").exists() != is_sharded
    report = load_weights(other, tmp_path / "theirs")
    assert not report.missing and not report.unused
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        expected = model(tokens).logits
        assert torch.equal(other(tokens).logits, expected)
        save_weights(other, tmp_path / "ours", file_bytes=4000 if is_sharded else 1 << 30)
        config.save_pretrained(tmp_path / "ours")
        again = model_class.from_pretrained(tmp_path / "ours").eval()
        assert torch.equal(again(tokens).logits, expected)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "SIGKILL", "SIGSTOP"])
def test_a_rank_that_is_lost_while_weights_are_saved_is_named(tmp_path: Path, how: str) -> None:
    payload = {"how": how, "deadline_s": 5.0, "folder": str(tmp_path)}
    with pytest.raises((RankLostError, RankError, BindError), match="rank 1"):
        launch("weights_rank_functions:save_with_a_lost_rank", 3, payload, timeout_s=180, env=HERE)
    for rank in (0, 2):
        error, missing, text, seconds = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (error, missing) == ("RankLostError", [1]) or (how == "raise" and "rank 1" in text), text
        assert seconds < 10
    assert not list(tmp_path.glob("*.safetensors"))


def test_two_tensors_under_one_name_are_refused_and_empty_ones_are_kept(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("nothing", torch.zeros(0, 4))
    with pytest.raises(LayoutError, match="two tensors are to be stored as x"):
        save_weights(module, tmp_path, mapping={"weight": "x", "bias": "x"})
    with pytest.raises(LayoutError, match="weight is on the meta device"):
        save_weights(torch.nn.Linear(2, 2, device="meta"), tmp_path)
    save_weights(module, tmp_path)
    again = torch.nn.Linear(2, 2)
    again.register_buffer("nothing", torch.ones(0, 4))
    assert load_weights(again, tmp_path).loaded.keys() == {"weight", "bias", "nothing"}
    assert torch.equal(again.weight, module.weight)


def test_a_function_that_knows_no_name_leaves_the_own_one(tmp_path: Path) -> None:
    layer, again = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    save_weights(layer, tmp_path, mapping={"weight": "w"}.get)
    assert load_weights(again, tmp_path, mapping={"weight": "w"}.get).loaded == {
        "weight": "w",
        "bias": "bias",
    }
    assert torch.equal(again.weight, layer.weight) and torch.equal(again.bias, layer.bias)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_layers_that_torch_wraps_are_saved_and_loaded_under_their_names(
    tmp_path: Path, is_compiled: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), checkpoint_wrapper(torch.nn.Linear(4, 4)))
    model.register_buffer("passing", torch.ones(1), persistent=False)
    module = torch.compile(model, backend="eager") if is_compiled else model
    save_weights(module, tmp_path)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    assert load_weights(plain, tmp_path).loaded == {name: name for name in plain.state_dict()}
    assert torch.equal(plain[1].weight, model[1].weight)
    save_weights(plain.requires_grad_(False).apply(_cleared), tmp_path)
    assert load_weights(module, tmp_path).loaded.keys() == plain.state_dict().keys()
    assert not any(bool(each.any()) for each in model.parameters())


def _cleared(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.zero_()


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"weight": ONES.to(torch.int8)}, "is quantised, as torch.int8; write that file in a floating"),
        ({"weight": ONES.to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 1)}, "is quantised"),
        ({"weight": ONES.to(torch.complex64)}, "weight is torch.float32, and weight of .* torch.complex64"),
        ({"weight": ONES.to(torch.float8_e4m3fn)}, ""),
        ({"weight": ONES.double()}, ""),
    ],
)
def test_codes_of_a_quantised_weight_are_not_taken_for_its_values(
    tmp_path: Path, stored: dict[str, torch.Tensor], words: str
) -> None:
    module = torch.nn.Linear(2, 2, bias=False)
    module.register_buffer("mask", torch.zeros(2))
    save_file({**stored, "mask": torch.ones(2, dtype=torch.bool)}, tmp_path / "model.safetensors")
    if not words:
        load_weights(module, tmp_path)
        assert bool((module.weight == 1).all() and (module.mask == 1).all())
        return
    with pytest.raises(LayoutError, match=words):
        load_weights(module, tmp_path)


def test_a_save_that_ends_early_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _filled(1.0), _filled(2.0)
    save_weights(first, tmp_path, file_bytes=90)
    names = sorted(path.name for path in tmp_path.iterdir())
    write, count = save._write, itertools.count()

    def fails_at_the_second(*given: Any) -> None:
        if next(count):
            raise OSError(28, "No space left on device")
        write(*given)

    monkeypatch.setattr(save, "_write", fails_at_the_second)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_weights(second, tmp_path, file_bytes=90)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    monkeypatch.undo()
    assert _read(tmp_path) == {1.0}
    real = Path.replace
    for moment in (1, 2):  # a process that is killed there: between names there is no index
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", _raises_at(real, moment))
            with pytest.raises(CheckpointError):
                save_weights(second, tmp_path, file_bytes=90)
        with pytest.raises(DescriptionError, match="no safetensors here"):
            _read(tmp_path)
    save_weights(second, tmp_path, file_bytes=90)
    assert _read(tmp_path) == {2.0} and sorted(path.name for path in tmp_path.iterdir()) == names


def _filled(value: float) -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    return module


def _read(folder: Path) -> set[float]:
    """Return the values of a checkpoint of `_filled`."""
    module = _filled(0.0)
    load_weights(module, folder)
    return {value for parameter in module.parameters() for value in parameter.detach().flatten().tolist()}


def _raises_at(real: Any, moment: int) -> Any:
    count = itertools.count()

    def replace(path: Path, target: Path) -> Path:
        if next(count) == moment:
            raise OSError("killed")
        return real(path, target)

    return replace


@pytest.mark.gloo
def test_ranks_outside_of_a_mesh_have_nothing_of_its_tensors(tmp_path: Path) -> None:
    save_file(
        {"scale": torch.tensor(3.0), "weight": torch.arange(6.0).view(3, 2)}, tmp_path / "model.safetensors"
    )
    results = launch(
        "weights_rank_functions:outside_of_a_mesh", 2, {"folder": str(tmp_path)}, timeout_s=180, env=HERE
    )
    said = "LayoutError: 'weight' has other values on rank 1 than on rank 0: parameters of different stages need "
    assert results == [[3.0, 15.0, f"{said}names that differ, and copies of one the same values"]] * 2


@pytest.mark.parametrize("size", [5e9, 0, -1, True, None, "5 GX", "0GB", "0.1"])
def test_what_is_no_size_of_a_file_is_refused(size: Any) -> None:
    with pytest.raises(LayoutError, match="max_shard_size is"):
        bytes_of(size)
