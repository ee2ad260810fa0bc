"""Software stacks by name: their constants, fitted on published training runs, and what they do by default.

`catalog/stacks.toml` has the constants of time and `catalog/fragmentation.toml` that of memory. Fitted by
`validation/fit_stacks.py` and `validation/fit_memory.py` on half of the families of published runs (`meshweave
reproduce published` scores the others). The table below has what is no constant.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshweave.base.errors import DescriptionError, did_you_mean
from meshweave.describe.files import parse_table
from meshweave.tune.step.problem import SoftwareStack

_FILE, _MEMORY_FILE = "stacks.toml", "fragmentation.toml"
_DEFAULTS: dict[str, dict[str, Any]] = {
    "megatron-2021": {"blocks_transfers": True, "accumulates": True},
    "llm-foundry": {"regathers": True, "sharding": "fsdp"},
    "torchtitan": {"sharding": "fsdp2", "copies_norm_inputs": True},
    "nanotron": {
        "accumulates": True,
        "adds_gradients_late": True,
        "buckets_gradients": True,
        "layers_by_cost": True,
        "keeps_joint_qkv": True,
    },
}
"""What a stack does where nobody says otherwise. megatron-2021 is Megatron-LM before fused attention and
overlapped transfers."""


def stack_names() -> tuple[str, ...]:
    """Return the names of software stacks that have fitted constants."""
    return tuple(_DEFAULTS)


@lru_cache(maxsize=1)
def stack_table() -> dict[str, Any]:
    """Return `catalog/stacks.toml`: constants of stacks, and rates of kernels of attention."""
    return _catalog_table(_FILE)


@lru_cache(maxsize=1)
def _fragmentation() -> dict[str, Any]:
    return _catalog_table(_MEMORY_FILE)


def _catalog_table(name: str) -> dict[str, Any]:
    return parse_table((files("meshweave") / "catalog" / name).read_text("utf-8"), name, "toml")


def load_stack(name: str) -> SoftwareStack:
    """Return a software stack by its name, or for "none" one that adds nothing.

    Raises:
        DescriptionError: no stack has this name.
    """
    if name == "none":
        return SoftwareStack()
    if name not in _DEFAULTS:
        known = ("none", *stack_names())
        raise DescriptionError(f"no stack '{name}'{did_you_mean(name, known)}; known: {', '.join(known)}")
    constants = {
        **stack_table().get("stacks", {}).get(name, {}),
        "fragmentation": _fragmentation().get(name, 0.0),
    }
    return SoftwareStack(name, **constants, **_DEFAULTS[name])
