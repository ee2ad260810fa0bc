"""What users call the fields of a configuration, in options and reports, and how they give tensor ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshweave.base.errors import LayoutError, MeshweaveError, require_count

SHORT_NAMES = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "cp": "context",
    "vp": "virtual_stages",
    "ep": "expert",
    "etp": "expert_tensor",
}
"""What users call the degrees and the virtual stages, and the attributes of `Parallelism` that have them."""
FIELDS_OF_SPACE = {
    "strategy": "strategies",
    "schedule": "schedules",
    "order": "orders",
    "micro_batch": "micro_batches",
}
"""What users call attributes of `SpaceOptions` of which they give one, and the attributes; see `SHORT_NAMES`."""


def by_field(options: Mapping[str, Any], names: Mapping[str, str] = SHORT_NAMES) -> dict[str, Any]:
    """Return options under attribute names in place of users' short names, in the order given.

    `names` maps users' names to attributes: {"tp": 2, "zero": 1} becomes {"tensor": 2, "zero": 1}.

    Raises:
        LayoutError: two options mean one attribute, such as "tp" and "tensor".
    """
    fields: dict[str, str] = {}
    for name in options:
        other = fields.setdefault(names.get(name, name), name)
        if other != name:
            raise LayoutError(f"{other} and {name} are the same option; give one of them")
    return {field: options[name] for field, name in fields.items()}


def require_tensor(tensor: object, what: str, kind: type[MeshweaveError]) -> int | tuple[int, int]:
    """Return a number of ranks, or a mesh (d1, d2) of them, in ints.

    Raises an error of class `kind` where `tensor` is neither; `what` names the value in its message.
    """
    sizes = tensor if isinstance(tensor, tuple) else (tensor,)
    if len(sizes) != (2 if isinstance(tensor, tuple) else 1):
        raise kind(f"{what} is {tensor}; give a number of ranks or a mesh (d1, d2)")
    counts = [require_count(size, what, kind) for size in sizes]
    return counts[0] if len(counts) == 1 else (counts[0], counts[1])
