"""Parameters of modules as they are used: gathered together, and their gradients summed together, in one node.

Who runs many modules opens the parameters of all of them: each then takes its own from there. A module that nobody
has opened takes what it needs itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshweave.execute.torch import compat
from meshweave.nn.parallel.buckets import KeptParameter, ParameterBucket
from meshweave.nn.parallel.moves import Mover
from meshweave.nn.parallel.parameters import local_parts
from meshweave.nn.parallel.strategy import LayerStrategy


class KeepsParameters(Protocol):
    """A module whose parameters are kept by a strategy.

    Attributes:
        kept: how each is, by name.
        opened: the parameters as they are used, by name, where somebody has opened them.
    """

    kept: dict[str, KeptParameter]
    opened: dict[str, Tensor]


Entry = tuple[KeepsParameters, str]
"""A module that keeps parameters, and the name of one of them."""


_Divided = tuple[list[int], ParameterBucket | None]


def entries_of(modules: Sequence[KeepsParameters]) -> list[Entry]:
    """Return all parameters that modules keep."""
    return [(module, name) for module in modules for name in module.kept]


@dataclass(eq=False)
class GatheredBucket:
    """A bucket that was gathered, whose memory can be given back and be filled again.

    Attributes:
        own: what this rank keeps.
    """

    bucket: ParameterBucket
    own: tuple[Tensor, ...]

    def fill_again(self, flat: Tensor) -> None:
        """Gather it again where its memory was given back."""
        storage = flat.untyped_storage()
        if not storage.size():
            storage.resize_(flat.numel() * flat.element_size())
            # Not by its name, for what autograd keeps of it is the same as before.
            self.bucket.fill(self.bucket.views(flat.data), self.own)


Sums = list[Callable[[], None]]
"""What ends sums of gradients that have begun."""


class _OwnParts(torch.autograd.Function):  # type: ignore[misc]
    """What a rank keeps of parameters; once their gradients are summed, these lie as the parameters do."""

    @staticmethod
    def forward(ctx: Any, sums: Sums, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's part of each parameter, and keep what gradients need."""
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.specs = sums, [compat.spec_of(parameter) for parameter in parameters]
        parts = [compat.local_tensor(parameter) for parameter in parameters]
        own = [part.view_as(part) for part in parts]
        frozen = [mine for mine, each in zip(own, parameters, strict=True) if not each.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments; None for what has none."""
        while ctx.sums:
            ctx.sums.pop(0)()
        pairs = zip(grads, ctx.specs, strict=True)
        return None, *(None if grad is None else compat.from_spec(grad, spec) for grad, spec in pairs)


class _UsedTogether(torch.autograd.Function):  # type: ignore[misc]
    """Parameters of a bucket as they are used, of what `_OwnParts` has made: their gradients are summed together.

    The sums end in the backward part of `_OwnParts`, which comes last. Until then the gradients between the two
    are memory without values, that nobody else has: `_OwnParts` gives each parameter to one bucket alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        bucket: ParameterBucket,
        gathered: list[tuple[GatheredBucket, Tensor]],
        sums: Sums,
        *own: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the result, and keep what gradients need."""
        ctx.set_materialize_grads(False)
        ctx.bucket, ctx.sums, ctx.shapes = bucket, sums, [each.shape for each in own]
        frozen = [not each.requires_grad for each in own]
        if bucket.kept[0].gathered:
            flat = own[0].new_empty(bucket.num_used)
            bucket.fill(views := bucket.views(flat), own)
            gathered.append((GatheredBucket(bucket, tuple(each.detach() for each in own)), flat))
        else:
            views = [each.view_as(each) for each in own]
        ctx.mark_non_differentiable(
            *(view for view, is_frozen in zip(views, frozen, strict=True) if is_frozen)
        )
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments; None for what has none."""
        needs = [at for at, is_needed in enumerate(ctx.needs_input_grad[3:]) if is_needed]
        made: list[Tensor | None] = [None] * len(grads)
        if any(grads[at] is not None for at in needs):
            bucket = ctx.bucket.only(tuple(needs))
            summed, end = bucket.begin_sum([grads[at] for at in needs], [ctx.shapes[at] for at in needs])
            ctx.sums.append(end)
            for at, grad in zip(needs, summed, strict=True):
                made[at] = grad
        return None, None, None, *made


class _GatherAgain(torch.autograd.Function):  # type: ignore[misc]
    """The results of what uses gathered parameters as they are; their backward part has these again."""

    @staticmethod
    def forward(
        ctx: Any, gathered: list[tuple[GatheredBucket, Tensor]], *results: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the results, and keep what gradients need."""
        ctx.set_materialize_grads(False)
        ctx.buckets = [bucket for bucket, _ in gathered]
        ctx.save_for_backward(*(flat for _, flat in gathered))
        return tuple([x.view_as(x) for x in results])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments; None for what has none."""
        for bucket, flat in zip(ctx.buckets, ctx.saved_tensors, strict=True):
            bucket.fill_again(flat)
        return None, *grads


class ParameterUse:
    """Parameters of some modules, used by one call.

    Args:
        units: parameters that are used together, in the order in which their gradients come. A bucket has whole
            units.
        most_bytes: a bucket of as many gets no further unit; None for no limit.
    """

    def __init__(self, units: Sequence[Sequence[Entry]], most_bytes: int | None = None) -> None:
        self.entries = [entry for unit in units for entry in unit]
        for module, name in self.entries:
            if name in module.kept:  # else it is another module's: a tied head's
                _ = module.kept[name].alone  # made now: a compiler does not trace how
        self._meshes = [
            module.kept[n].strategy.device_mesh if n in module.kept else None for module, n in self.entries
        ]
        self._begins = set(itertools.accumulate((len(unit) for unit in units), initial=0))
        self._most_bytes = most_bytes
        self._buckets: dict[Any, list[_Divided]] = {}
        self._last_kinds: Any = None
        self._rests: dict[tuple[int, ...], ParameterUse] = {}

    def __call__(self) -> list[Tensor]:
        """Return the parameters as they are used, of this rank, differentiably; all ranks call it."""
        if all(name in module.opened for module, name in self.entries):
            return [module.opened[name] for module, name in self.entries]
        return self._used([])

    @contextmanager
    def open(self, gathered: list[tuple[GatheredBucket, Tensor]]) -> Iterator[None]:
        """Open the parameters for what runs inside, but for those that are open already.

        Args:
            gathered: gets what was gathered.
        """
        places = [at for at, (module, name) in enumerate(self.entries) if name not in module.opened]
        use = self if len(places) == len(self.entries) else self._rest(tuple(places))
        for (module, name), tensor in zip(use.entries, use._used(gathered), strict=True):
            module.opened[name] = tensor
        try:
            yield
        finally:
            for module, name in use.entries:
                del module.opened[name]

    def _rest(self, places: tuple[int, ...]) -> ParameterUse:
        if places not in self._rests:
            self._rests[places] = ParameterUse([[self.entries[at] for at in places]], self._most_bytes)
        return self._rests[places]

    @property
    def is_here(self) -> bool:
        """Return whether all parameters lie as the strategy has laid them, and not as those of wrapped modules."""
        for parameter, mesh in zip(self._parameters(), self._meshes, strict=True):
            if not isinstance(parameter, DTensor):
                return False
            if (own := compat.spec_of(parameter).mesh) is not mesh and own != mesh:
                return False
        return True

    def _parameters(self) -> list[Tensor]:
        """Return the parameters as they are kept, as their modules have them now."""
        return [getattr(module, name) for module, name in self.entries]

    def _used(self, gathered: list[tuple[GatheredBucket, Tensor]]) -> list[Tensor]:
        parameters = self._parameters()
        if torch.compiler.is_compiling() or not all(isinstance(each, DTensor) for each in parameters):
            kept = (module.kept[name] for module, name in self.entries)
            return [_alone(each, one) for each, one in zip(parameters, kept, strict=True)]
        used: list[Any] = [None] * len(parameters)
        for places, bucket in self._buckets_of(parameters) if parameters else ():
            given = [parameters[at] for at in places]
            if bucket is None:
                made = local_parts(given)
            else:
                sums: Sums = []
                own = compat.apply_directly(_OwnParts, sums, *given)
                made = compat.apply_directly(_UsedTogether, bucket, gathered, sums, *own)
            for at, tensor in zip(places, made, strict=True):
                used[at] = tensor
        return used

    def _buckets_of(self, parameters: Sequence[Tensor]) -> list[_Divided]:
        key = tuple([(each.dtype, each.requires_grad) for each in parameters])
        if key not in self._buckets:
            self._buckets[key] = self._divided(key)
        if key != self._last_kinds:  # as others are frozen, or cast
            for _, bucket in self._buckets.get(self._last_kinds, ()):
                if bucket is not None:
                    bucket.release()
            self._last_kinds = key
        return self._buckets[key]

    def _divided(self, kinds: Sequence[tuple[torch.dtype, bool]]) -> list[_Divided]:
        """Return the places of the parameters of each bucket; of those that do not move, without one."""
        lists: dict[Any, list[list[int]]] = {}
        sizes: dict[Any, int] = {}
        kept = [module.kept[name] for module, name in self.entries]
        for at, (each, (dtype, is_trained)) in enumerate(zip(kept, kinds, strict=True)):
            moves = each.gathered or (each.summed and is_trained)
            key = (each.gathered, each.summed, dtype) if moves else ((), (), is_trained)
            own = lists.setdefault(key, [[]])
            if at in self._begins and self._most_bytes is not None and sizes.get(key, 0) >= self._most_bytes:
                own.append([])
                sizes[key] = 0
            own[-1].append(at)
            sizes[key] = sizes.get(key, 0) + (each.most * dtype.itemsize if moves else 0)
        divided: list[_Divided] = []
        for (gathered, summed, dtype), own in lists.items():
            for places in own:
                together = tuple(kept[at] for at in places)
                divided.append((places, ParameterBucket(together, dtype) if gathered or summed else None))
        return divided


class ThroughoutUse(ParameterUse):
    """Parameters that a call of a model uses from some moment on, last ones first: their gradients are.

    A bucket is opened where the first of its units runs, so that its backward part is due when that unit's is: its
    gradients are summed beside the backward parts of the units before. The units are what comes after the layers,
    the layers from the last to the first, and what comes before them.
    """

    def __init__(self, units: Sequence[Sequence[Entry]], most_bytes: int | None = None) -> None:
        super().__init__(units, most_bytes)
        self._moments = [len(units) - 2 - number for number, unit in enumerate(units) for _ in unit]
        self._later: list[tuple[int, list[int], ParameterBucket]] = []
        self._own: dict[int, Tensor] = {}
        self._sums: Sums = []
        self._has_gradients = True

    @contextmanager
    def open_by_layer(self) -> Iterator[None]:
        """Open the parameters for a call that runs inside: those before the layers now, others in `reach`."""
        parameters = self._parameters()
        later: list[tuple[int, list[int], ParameterBucket]] = []
        for places, bucket in self._buckets_of(parameters) if parameters else ():
            if bucket is None:
                self._put(places, local_parts([parameters[at] for at in places]))
            else:
                later.append((min(self._moments[at] for at in places), places, bucket))
        self._later = sorted(later, key=lambda each: each[0], reverse=True)
        self._sums, self._has_gradients = [], torch.is_grad_enabled()
        moved = [at for _, places, _ in later for at in places]
        if moved:
            kept = compat.apply_directly(_OwnParts, self._sums, *(parameters[at] for at in moved))
            self._own = dict(zip(moved, kept, strict=True))
        try:
            self.reach(-1)
            yield
        finally:
            self._later, self._own, self._sums = [], {}, []
            for module, name in self.entries:
                module.opened.pop(name, None)

    def reach(self, layer: int) -> None:
        """Open what is used from this layer on, or before; after the last layer its number plus one.

        Nothing is done outside of `open_by_layer`.
        """
        while self._later and self._later[-1][0] <= layer:
            _, places, bucket = self._later.pop()
            with torch.set_grad_enabled(self._has_gradients):  # also where a layer is to be computed again
                own = [self._own.pop(at) for at in places]
                self._put(places, compat.apply_directly(_UsedTogether, bucket, [], self._sums, *own))

    def _put(self, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        for at, tensor in zip(places, tensors, strict=True):
            module, name = self.entries[at]
            module.opened[name] = tensor


BUCKET_BYTES = 25 << 20
"""The bytes of parameters after which a bucket is closed: torch's DistributedDataParallel has as many."""


def used_throughout(
    strategy: LayerStrategy,
    last: Sequence[KeepsParameters],
    layers: Sequence[ParameterUse],
    first: Sequence[KeepsParameters],
) -> ThroughoutUse:
    """Return the parameters that a call uses until its end, last ones first.

    These are the ends, and of layers what is summed and is not gathered for each use.

    Args:
        last, first: the modules after the layers, and those before them.
        layers: the parameters of each layer, those of the last layer first.
    """
    frees = not strategy.roles.keeps_weights
    of_layers = [
        [
            (module, name)
            for module, name in use.entries
            if (kept := module.kept[name]).summed and not (kept.gathered and frees)
        ]
        for use in layers
    ]
    return ThroughoutUse([entries_of(last), *of_layers, entries_of(first)], BUCKET_BYTES)


def _alone(parameter: Tensor, kept: KeptParameter) -> Tensor:
    """Return a parameter as it is used, moved by itself, by ops that a compiler knows."""
    (local,) = local_parts([parameter])
    if isinstance(kept.alone, Mover):
        return kept.alone(local, 1, 1)
    if kept.alone is not None:
        (local,) = kept.alone([local])
    return local


def run_with(use: ParameterUse, run: Callable[[], Any], *, frees: bool, frees_now: bool) -> Any:
    """Return what `run` makes of parameters that are opened for it: a tensor, or several.

    Args:
        frees: whether gathered parameters are freed after it, and gathered again by the backward pass.
        frees_now: whether that is worth it: not where the backward pass comes next. Inside of a backward pass,
            which computes something again, nothing is freed.
    """
    gathered: list[tuple[GatheredBucket, Tensor]] = []
    with use.open(gathered):
        out = run()
    several = list(out) if isinstance(out, tuple | list) else [out]
    places = [at for at, each in enumerate(several) if isinstance(each, Tensor) and each.requires_grad]
    if not (frees and gathered and places):
        return out
    again = _GatherAgain.apply(gathered, *(several[at] for at in places))
    for at, each in zip(places, again, strict=True):
        several[at] = each
    if frees_now and not compat.is_in_backward():
        for _, flat in gathered:
            flat.untyped_storage().resize_(0)
    return type(out)(several) if isinstance(out, tuple | list) else several[0]
