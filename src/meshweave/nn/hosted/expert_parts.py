"""What a call of a module of experts shows: how many there are, and where their inner features lie."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.algorithms.block.roles import Side, Sides
from meshweave.base.errors import UnsupportedError
from meshweave.nn.prove.state import WideCasts

_COUNTS = re.compile(r"expert")
_WIDTHS = re.compile(r"inter|inner|ffn|expert_dim|ff_dim")


@dataclass(frozen=True)
class InnerForm:
    """Where the inner features of experts lie in one of their parameters.

    Attributes:
        dim: the index of the dim along which they lie.
        parts: how many matrices lie side by side along that dim.
        unit: how many consecutive elements of a matrix along that dim an inner feature has.
    """

    dim: int
    parts: int = 1
    unit: int = 1

    def columns(self, features: range, inner: int) -> Tensor:
        """Return the indices along `dim` of some inner features, a 1-D int64 tensor.

        They are ordered by matrix, then feature, then element: features 0 and 1 of 4 in two matrices -> [0, 1, 4,
        5].

        Args:
            features: the numbers of the features.
            inner: how many inner features each expert has in all.
        """
        own = [
            part * inner * self.unit + feature * self.unit + at
            for part in range(self.parts)
            for feature in features
            for at in range(self.unit)
        ]
        return torch.tensor(own)


@dataclass(frozen=True)
class ExpertsPart:
    """The experts of a layer, as a trace shows them.

    Attributes:
        path: the name of their module in the layer.
        count: how many experts there are.
        inner: how many inner features each has; 0 where that is not known.
        forms: for each parameter that has inner features, where they lie; empty where that is not known.
        added: names of parameters that are added after the products over inner features, such as biases.
        order: for each operand of a call, in their order, "x" (rows), "index" (choices) or "gates".
    """

    path: str
    count: int
    inner: int
    forms: Mapping[str, InnerForm]
    added: tuple[str, ...]
    order: tuple[str, ...]

    def sides(self, key: str, shape: Sequence[int]) -> tuple[Sides, int]:
        """Return (sides, parts) of the parameter `key`, whose global shape is `shape`.

        Sides are its dims, named: "expert" first, then "inner" for the dim of inner features and "hidden" for the
        first other one, "" for those after it. Parts are how many matrices lie side by side along the inner
        features.
        """
        form, sides = self.forms.get(key), [Side("expert", self.count)]
        for dim, size in enumerate(shape[1:], 1):
            if form is not None and dim == form.dim:
                sides.append(Side("inner", self.inner, form.unit))
            else:
                is_taken = any(side.dim == "hidden" for side in sides)
                sides.append(Side("" if is_taken else "hidden", int(size)))
        return tuple(sides), 1 if form is None else form.parts


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has a parameter of three dims, as experts stored in one tensor have."""
    return any(p is not None and p.ndim == 3 for p in module._parameters.values())


def operand_indices(values: Sequence[Any]) -> tuple[int, int, int]:
    """Return the indices of (rows, choices, gates) among the operands `values` of a call of a module of experts.

    Raises UnsupportedError where the operands are not these three tensors.
    """
    tensors = [at for at, value in enumerate(values) if isinstance(value, Tensor)]
    whole = [at for at in tensors if not values[at].is_floating_point()]
    real = [at for at in tensors if values[at].is_floating_point()]
    if len(tensors) == 3 and len(whole) == 1:
        index = values[whole[0]]
        gates = [at for at in real[1:] if values[at].shape == index.shape]
        if index.ndim == 2 and gates:
            return real[0], whole[0], gates[0]
    raise UnsupportedError(
        f"experts are called with {len(tensors)} tensors of which {len(whole)} are whole numbers; rows, choices "
        "and gates (tokens, experts of a token) are computed"
    )


def own_call(
    own: Any,
    part: ExpertsPart,
    parameters: Mapping[str, Tensor],
    sizes: tuple[int, int],
    x: Tensor,
    index: Tensor,
    gates: Tensor,
) -> Tensor:
    """Return the result (rows, hidden) of a module of experts, by its own code, which computes with `parameters`.

    Args:
        own: the module, without parameters; its attributes are changed during the call.
        part: what a trace shows of it.
        parameters: by name, of all experts or of some, with all or some of their inner features.
        sizes: (experts that the parameters have, inner features of each).
        x: (rows, hidden).
        index: (rows, choices): for each row the experts chosen, counted from the first one in `parameters`.
        gates: (rows, choices): the weights of these.
    """
    names = {"x": x, "index": index, "gates": gates}
    attributes = own.__dict__
    before = dict(attributes)
    attributes.update(_sized(before, part, sizes))
    attributes.update(parameters)
    try:
        made: Tensor = type(own).forward(own, *(names[name] for name in part.order))
    finally:
        attributes.clear()
        attributes.update(before)
    return made


def _sized(
    attributes: Mapping[str, Any], part: ExpertsPart, sizes: tuple[int, int]
) -> Iterator[tuple[str, int]]:
    """Yield the attributes that count experts or inner features, with what they are here."""
    for name, value in attributes.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if _COUNTS.search(name) and value == part.count:
            yield name, sizes[0]
        elif _WIDTHS.search(name) and part.inner and value % part.inner == 0:
            yield name, value // part.inner * sizes[1]


# --- reading a call -------------------------------------------------------------------------------------------


def experts_part(name: str, module: nn.Module, given: Sequence[Any], made: Tensor) -> ExpertsPart:
    """Return how many experts a module has and where their parameters lie, read off one call of it.

    Where inner features do not lie in a known form, `inner` of the result is 0 and `forms` is empty.

    Args:
        name: the module's, in the layer.
        module: the module of experts, with its parameters.
        given: the operands of the call.
        made: its result.

    Raises UnsupportedError, with the name of the module, for one of another form.
    """
    kind = type(module).__name__
    own = {key: value.detach() for key, value in module._parameters.items() if value is not None}
    (count,) = {int(value.shape[0]) for value in own.values() if value.ndim == 3} or {0}
    if any(p.ndim not in (2, 3) or p.shape[0] != count for p in own.values()) or any(
        True for child in module.children() for _ in child.parameters()
    ):
        raise UnsupportedError(f"{name}: {kind} has parameters that are not one for each of {count} experts")
    try:
        at = operand_indices(given)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {kind}: {error}") from error
    order = tuple(word for _, word in sorted(zip(at, ("x", "index", "gates"), strict=True)))
    x, index, gates = (given[place].detach() for place in at)
    bare = copy.copy(module)
    bare._parameters = {}
    best = ExpertsPart(name, count, 0, {}, (), order)
    with torch.no_grad(), WideCasts():
        for part in _candidates(best, own, int(x.shape[-1])):
            if _is_right(bare, part, own, (x, index, gates), made):
                return part
    return best


def _candidates(part: ExpertsPart, own: Mapping[str, Tensor], hidden: int) -> Iterator[ExpertsPart]:
    """Yield parts by the places where inner features may lie in the parameters of experts."""
    matrices = [value for value in own.values() if value.ndim == 3]
    sizes = [int(size) for value in matrices for size in value.shape[1:]]
    for inner in sorted(
        {math.gcd(*pair) for pair in itertools.combinations(sizes, 2)} | set(sizes), reverse=True
    ):
        if inner < 2:
            continue
        choices: list[list[InnerForm | None]] = []
        for value in own.values():
            choices.append([] if value.ndim == 3 else [None])
            for dim, size in list(enumerate(value.shape))[1:]:
                many, rest = divmod(int(size), inner)
                if not rest and (value.ndim == 2 or int(value.shape[3 - dim]) == hidden):
                    choices[-1] += [InnerForm(dim, many, 1)]
                    choices[-1] += [InnerForm(dim, 1, many)] if many > 1 else []
        for chosen in itertools.islice(itertools.product(*choices), 64):
            forms = {key: form for key, form in zip(own, chosen, strict=True) if form is not None}
            added = tuple(key for key, form in zip(own, chosen, strict=True) if form is None)
            yield ExpertsPart(part.path, part.count, inner, forms, added, part.order)


def _is_right(
    bare: Any, part: ExpertsPart, own: Mapping[str, Tensor], given: Sequence[Tensor], made: Tensor
) -> bool:
    """Return whether the terms of two runs of inner features add up to the result."""
    total = torch.zeros_like(made)
    for features in (range(1), range(1, part.inner)):
        parameters = {}
        for key, value in own.items():
            if key in part.forms:
                columns = part.forms[key].columns(features, part.inner).to(value.device)
                parameters[key] = value.index_select(part.forms[key].dim, columns)
            else:
                parameters[key] = value if features.start == 0 else value * 0
        x, index, gates = given
        try:
            total += own_call(bare, part, parameters, (part.count, len(features)), x, index, gates)
        except (RuntimeError, IndexError, ValueError):
            return False
    return bool(torch.allclose(total, made, rtol=1e-9, atol=1e-10))
