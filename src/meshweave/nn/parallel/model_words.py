"""A rank's description of a model and of where it runs, as words that `agreed` compares."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshweave.nn.parallel.agreed import without_addresses
from meshweave.nn.parallel.checksums import checksum

_SIMPLE = (bool, int, float, str, type(None))
_OF_ONE_RANK = ("rank", "device", "path")  # in names of attributes that may well differ


def argument_words(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return arguments as text by name, for comparison between ranks.

    Where `plan` is the path of a .json file, "plan file" and a hash of the file's content take the place of the
    path.
    """
    words = {}
    for name, value in arguments.items():
        words[name] = _text(value)
        if name == "plan" and str(value).endswith(".json") and Path(str(value)).is_file():
            words["plan file"] = hashlib.sha256(Path(str(value)).read_bytes()).hexdigest()[:12]
            words.pop(name)  # each host may have it elsewhere
    return words


def _text(value: Any) -> str:
    """Return the `repr` of a value, without memory addresses, and of sets in an order that all processes have."""
    return without_addresses(repr(_ordered(value)))


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _ordered(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_ordered, value), key=repr)
    return list(map(_ordered, value)) if isinstance(value, list | tuple) else value


def version_words() -> dict[str, str]:
    """Return the versions of software that ranks must have alike, by name."""
    words = {"meshweave": sys.modules["meshweave"].__version__, "torch": str(torch.__version__)}
    words["python"] = ".".join(map(str, sys.version_info[:2]))
    if "transformers" in sys.modules:
        words["transformers"] = str(getattr(sys.modules["transformers"], "__version__", "unknown"))
    return words


def setting_words() -> dict[str, str]:
    """Return the settings of torch that ranks must have alike, as text by name: most change how products round."""
    backends = torch.backends
    return {
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": str(torch.are_deterministic_algorithms_enabled()),
        "torch.get_default_dtype()": str(torch.get_default_dtype()),
        "torch.is_inference_mode_enabled()": str(torch.is_inference_mode_enabled()),
        "torch.get_flush_denormal": str(bool(torch.tensor(1e-310, dtype=torch.float64).mul(1.0) == 0)),
        "torch.backends.cuda.matmul.allow_tf32": str(backends.cuda.matmul.allow_tf32),
        "torch.backends.cudnn.deterministic": str(backends.cudnn.deterministic),
        "torch.backends.mkldnn.enabled": str(getattr(backends.mkldnn, "enabled", True)),
        "reductions in bfloat16": str(backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
    }


def module_words(module: nn.Module) -> dict[str, str]:
    """Return for each module its class and the numbers and strings among its attributes, as text, by name.

    Attributes that may differ between ranks are left out: `training`, private ones, and those with "rank",
    "device" or "path" in their names.
    """
    words = {}
    for name, child in module.named_modules(remove_duplicate=False):
        kept = {
            key: value
            for key, value in vars(child).items()
            if isinstance(value, _SIMPLE)
            and not key.startswith("_")
            and key != "training"
            and not any(word in key for word in _OF_ONE_RANK)
        }
        settings = ", ".join(f"{key}={value!r}" for key, value in sorted(kept.items()))
        words[name or "the model"] = f"{type(child).__qualname__}({settings})"
    return words


def configuration_words(module: nn.Module) -> dict[str, str]:
    """Return the configuration of a model of transformers, or what it has as `config`, as text by key.

    Left out are private keys, those with "path" in them, which may differ between ranks, and the version of
    transformers that wrote it.
    """
    config = getattr(module, "config", None)
    to_dict = getattr(config, "to_dict", None)
    values = to_dict() if callable(to_dict) else getattr(config, "__dict__", {})
    return {
        str(key): _text(value)
        for key, value in values.items()
        if not str(key).startswith("_") and "path" not in str(key) and key != "transformers_version"
    }


def parameter_words(module: nn.Module) -> dict[str, str]:
    """Return, as text by name, shape, dtype, device type and placements of each parameter and buffer of a module.

    For a parameter it says also whether it is trained or frozen: "(4, 6) float32, trained".
    """
    words = {name: _kind(tensor) for name, tensor in module.named_buffers(remove_duplicate=False)}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        words[name] = f"{_kind(tensor)}, {'trained' if tensor.requires_grad else 'frozen'}"
    return words


def _kind(tensor: Tensor) -> str:
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
    places = f" {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{where}{places}"


def checksum_words(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return {name: "#" and a checksum in hexadecimal} of the tensors; those on the meta device are left out.

    The checksum of a DTensor is that of its local shard.
    """
    names, sums = [], []
    for name, tensor in tensors:
        if tensor.device.type != "meta":
            names.append(name)
            sums.append(checksum(tensor))
    by_device: dict[torch.device, list[int]] = {}
    for place, of_it in enumerate(sums):
        by_device.setdefault(of_it.device, []).append(place)
    values: dict[int, int] = {}
    for places in by_device.values():  # one copy to the host for each device
        values |= dict(zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True))
    return {name: f"#{values[place]:x}" for place, name in enumerate(names)}


def weight_words(module: nn.Module) -> dict[str, str]:
    """Return {name: "#" and a checksum in hexadecimal} of a model's plain parameters and buffers.

    DTensors, and tensors on the meta device, are left out.
    """
    return checksum_words(_tensors(module))


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    for named in (module.named_parameters(), module.named_buffers()):
        yield from ((name, tensor) for name, tensor in named if not isinstance(tensor, DTensor))


def copy_words(subject: str, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, dict[str, str]]:
    """Return {subject: {name: checksum}} of the local shards of those DTensors of which several ranks have copies.

    Ranks with copies of the same shard have equal subjects, so that `agree` compares copies. A subject is
    `subject`, " of parts ", this rank's coordinates along the mesh dims that shard the tensor ("all" where none
    does), " on " and the shape of the mesh: "weights of parts 1:0 on 2x2". Other tensors are left out.
    """
    parts: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        if isinstance(tensor, DTensor) and any(each.is_replicate() for each in tensor.placements):
            mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate() or ()
            split = [
                f"{dim}:{at}" for dim, (at, place) in enumerate(zip(here, tensor.placements, strict=True))
                if not place.is_replicate()
            ]  # fmt: skip
            shape = "x".join(map(str, mesh.shape))
            parts.setdefault(f"{subject} of parts {','.join(split) or 'all'} on {shape}", []).append(
                (name, tensor)
            )
    return {part: checksum_words(of_it) for part, of_it in parts.items()}
