"""Parameters of modules as they are used: gathered together, and their gradients summed together, in one node.

To open parameters is to put them, as they are used, into `opened` of their modules. What runs many modules opens
the parameters of all of them, and each takes its own from there. A module whose parameters are not open gathers
them by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, contains, getitem
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshweave.execute.torch import compat
from meshweave.nn.parallel.buckets import KeptParameter, ParameterBucket
from meshweave.nn.parallel.moves import Mover
from meshweave.nn.parallel.parameter_nodes import GatherAgain, GatheredBucket, OwnParts, Sums, UsedTogether
from meshweave.nn.parallel.parameters import local_parts
from meshweave.nn.parallel.strategy import LayerStrategy
from meshweave.nn.saved_versions import check_versions, versions


class KeepsParameters(Protocol):
    """A module whose parameters are kept by a strategy.

    Attributes:
        kept: how each parameter is kept, by name.
        opened: the parameters that are open now, by name, as products use them.
    """

    kept: dict[str, KeptParameter]
    opened: dict[str, Tensor]


Entry = tuple[KeepsParameters, str]
"""A module that keeps parameters, and the name of one of them."""


_DTYPE, _IS_TRAINED = attrgetter("dtype"), attrgetter("requires_grad")
_Divided = tuple[list[int], ParameterBucket | None]
_Later = tuple[int, list[int], ParameterBucket | None]
"""The moment at which a bucket is opened, or parameters that do not move, and their places."""


def entries_of(modules: Sequence[KeepsParameters]) -> list[Entry]:
    """Return (module, name of a parameter) for each parameter in `kept` of the modules, in order."""
    return [(module, name) for module in modules for name in module.kept]


class ParameterUse:
    """Parameters of some modules that one call gathers together, and whose gradients are summed together.

    To open a parameter is to put it, gathered as products use it, into `opened` of its module.

    Args:
        units: groups of parameters that are used together, in the order in which their gradients come. A group is
            never split between two buckets, as far as its parameters move along the same axes.
        most_bytes: a bucket that has as many bytes or more gets no further unit; None for no limit.
    """

    def __init__(self, units: Sequence[Sequence[Entry]], most_bytes: int | None = None) -> None:
        self.entries = [entry for unit in units for entry in unit]
        self._names = [name for _, name in self.entries]
        for module, name in self.entries:
            if name in module.kept:  # else it is another module's: a tied head's
                _ = module.kept[name].compiled_move  # made now: a compiler does not trace how
        self._opened = [module.opened for module, _ in self.entries]
        self._meshes = [
            module.kept[n].strategy.device_mesh if n in module.kept else None for module, n in self.entries
        ]
        self._units = [number for number, unit in enumerate(units) for _ in unit]
        self._most_bytes = most_bytes
        self._buckets: dict[Any, list[_Divided]] = {}
        self._last_kinds: Any = None
        self._rests: dict[tuple[int, ...], ParameterUse] = {}

    def __call__(self) -> list[Tensor]:
        """Return the parameters as this rank's products use them, differentiably. Collective.

        They are taken from `opened` if all are open there, else gathered now.
        """
        try:
            return list(map(getitem, self._opened, self._names))
        except KeyError:  # somebody has opened others, or none
            return self._used([])

    @contextlib.contextmanager
    def open(self, gathered: list[tuple[GatheredBucket, Tensor]]) -> Iterator[None]:
        """Open the parameters for the code in the block, except those that are open already. Collective.

        Args:
            gathered: (bucket, its memory of `num_used` elements) is appended for each bucket that is gathered
                here.
        """
        are_open = map(contains, self._opened, self._names)
        places = [at for at, is_open in enumerate(are_open) if not is_open]
        use = self if len(places) == len(self.entries) else self._rest(tuple(places))
        for opened, name, tensor in zip(use._opened, use._names, use._used(gathered), strict=True):
            opened[name] = tensor
        try:
            yield
        finally:
            for opened, name in zip(use._opened, use._names, strict=True):
                del opened[name]

    def _rest(self, places: tuple[int, ...]) -> ParameterUse:
        if places not in self._rests:
            self._rests[places] = ParameterUse([[self.entries[at] for at in places]], self._most_bytes)
        return self._rests[places]

    @property
    def is_open(self) -> bool:
        """Return whether all these parameters are open."""
        return all(map(contains, self._opened, self._names))

    def are_here(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether all `parameters` are DTensors on their strategy's device mesh; inside FSDP2 they are not.

        `parameters` are in the order of `parameters()`.
        """
        for parameter, mesh in zip(parameters, self._meshes, strict=True):
            if not isinstance(parameter, DTensor):
                return False
            if (own := compat.spec_of(parameter).mesh) is not mesh and own != mesh:
                return False
        return True

    @property
    def is_computed(self) -> bool:
        """Return whether a module computes some parameters at each use, as parametrizations and adapters do."""
        return any(hasattr(type(module), name) for module, name in self.entries)

    def parameters(self) -> list[Tensor]:
        """Return the parameters as DTensors that their modules have now, in the layout in which they are kept."""
        own = [getattr(module, name) for module, name in self.entries]
        if not self.is_computed:
            return own
        return [
            _laid(each, module.kept.get(name)) for each, (module, name) in zip(own, self.entries, strict=True)
        ]

    def _used(self, gathered: list[tuple[GatheredBucket, Tensor]]) -> list[Tensor]:
        if torch.compiler.is_compiling() or not self.is_computed:
            parameters = self.parameters()
        else:
            with torch.autograd.graph.saved_tensors_hooks(_keep, _unchanged):
                parameters = self.parameters()
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
                is_last = bucket if bucket.is_in_place else None
                made = compat.apply_directly(OwnParts, sums, is_last, *given)
                if is_last is None:
                    made = compat.apply_directly(UsedTogether, bucket, gathered, sums, *made)
            for at, tensor in zip(places, made, strict=True):
                used[at] = tensor
        return used

    def _buckets_of(self, parameters: Sequence[Tensor]) -> list[_Divided]:
        key = *map(_DTYPE, parameters), *map(_IS_TRAINED, parameters)
        if key != self._last_kinds:  # as others are frozen, or cast
            if key not in self._buckets:
                self._buckets[key] = self._divided(list(zip(key, key[len(parameters) :], strict=False)))
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
            begins = own[-1] and self._units[own[-1][-1]] != self._units[at]
            if begins and self._most_bytes is not None and sizes[key] >= self._most_bytes:
                own.append([])
                sizes[key] = 0
            own[-1].append(at)
            sizes[key] = sizes.get(key, 0) + (each.max_kept_elements * dtype.itemsize if moves else 0)
        divided: list[_Divided] = []
        for (gathered, summed, dtype), own in lists.items():
            for places in own:
                together = tuple(kept[at] for at in places)
                divided.append((places, ParameterBucket(together, dtype) if gathered or summed else None))
        return divided


class ThroughoutUse(ParameterUse):
    """Parameters that stay open from their first use in a call of a model to its end.

    Units are in the order in which gradients come: what comes after the layers, the layers from the last to the
    first, and what comes before them. A bucket is opened where the first of its units runs in the forward pass.
    Its backward part then runs after that of this unit, and its gradients are summed beside the backward parts of
    the units before.
    """

    def __init__(self, units: Sequence[Sequence[Entry]], most_bytes: int | None = None) -> None:
        super().__init__(units, most_bytes)
        self._moments = [len(units) - 2 - number for number in self._units]
        self._ordered: tuple[list[_Divided], list[_Later]] | None = None
        self._later: list[_Later] = []
        self._given: Sequence[Tensor] = ()
        self._own: dict[int, Tensor] = {}
        self._sums: Sums = []
        self._has_gradients = True

    @contextlib.contextmanager
    def open_by_layer(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Open the parameters for a call of the model in the block, some later than others. Collective.

        Those used before the layers are opened now, the others by `reach`.

        Args:
            parameters: all of them as they are kept, in the order of `parameters()`.
        """
        self._later = self._order_of(self._buckets_of(parameters) if parameters else [])
        self._given = parameters
        self._sums, self._has_gradients = [], torch.is_grad_enabled()
        try:
            self._take_own()
            self.reach(-1)
            yield
        finally:
            self._later, self._given, self._own, self._sums = [], (), {}, []
            for opened, name in zip(self._opened, self._names, strict=True):
                opened.pop(name, None)

    def _take_own(self) -> None:
        """Take this rank's parts of parameters that move, and open those used first where they lie as used."""
        moved = [at for _, places, bucket in self._later if bucket is not None for at in places]
        if not moved:
            return
        moment, at_once, bucket = self._later[-1]  # those that are used first, and whose sum is the last
        last = bucket if bucket is not None and moment < 0 and bucket.is_in_place else None
        parts = compat.apply_directly(OwnParts, self._sums, last, *[self._given[at] for at in moved])
        self._own = dict(zip(moved, parts, strict=True))
        if last is not None:
            self._later = self._later[:-1]
            self._put(at_once, [self._own.pop(at) for at in at_once])

    def reach(self, layer: int) -> None:
        """Open the parameters first used in layer number `layer`, from 0, or before that layer. Collective.

        -1 stands for what comes before the layers, their number for what comes after them. Nothing is done outside
        of `open_by_layer`.
        """
        while self._later and self._later[-1][0] <= layer:
            *self._later, (_, places, bucket) = self._later
            with torch.set_grad_enabled(self._has_gradients):  # also where a layer is to be computed again
                if bucket is None:
                    self._put(places, local_parts([self._given[at] for at in places]))
                else:
                    own = [self._own.pop(at) for at in places]
                    used = compat.apply_directly(UsedTogether, bucket, [], self._sums, *own)
                    self._put(places, used)

    def _order_of(self, divided: list[_Divided]) -> list[_Later]:
        """Return the buckets, and by unit the places of parameters that do not move; those used first last.

        Of parameters at one moment those that move come last.
        """
        if self._ordered is None or self._ordered[0] is not divided:
            later: list[_Later] = []
            for places, bucket in divided:
                if bucket is not None:
                    later.append((min(self._moments[at] for at in places), places, bucket))
                    continue
                for moment in {self._moments[at] for at in places}:
                    later.append((moment, [at for at in places if self._moments[at] == moment], None))
            later.sort(key=lambda each: (each[0], each[2] is None), reverse=True)
            self._ordered = divided, later
        return self._ordered[1]

    def _put(self, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        for at, tensor in zip(places, tensors, strict=True):
            self._opened[at][self._names[at]] = tensor


BUCKET_BYTES = 25 << 20
"""The bytes of parameters after which a bucket is closed: torch's DistributedDataParallel has as many."""


def used_throughout(
    strategy: LayerStrategy,
    last: Sequence[KeepsParameters],
    layers: Sequence[ParameterUse],
    first: Sequence[KeepsParameters],
) -> ThroughoutUse:
    """Return the parameters that stay open (gathered) from first use to the end of a call, last used first.

    These are all that modules outside of layers keep, and of layers those whose gradients are summed, but for
    those that each layer gathers and frees again. On a single rank they are all parameters: a node of autograd for
    each module would cost more than it computes.

    Args:
        strategy: how the model runs on its ranks.
        last, first: the modules after the layers, and those before them.
        layers: the parameters of each layer, those of the last layer first.
    """
    frees = not strategy.roles.keeps_weights
    of_layers = [
        [
            (module, name)
            for module, name in use.entries
            if strategy.is_alone or ((kept := module.kept[name]).summed and not (kept.gathered and frees))
        ]
        for use in layers
    ]
    return ThroughoutUse([entries_of(last), *of_layers, entries_of(first)], BUCKET_BYTES)


def _keep(saved: Tensor) -> tuple[Tensor, list[int]]:
    """Keep what computing a parameter saves apart from what its layer saves.

    torch compares the latter where it computes a layer again, and the parameters of that one may have been open
    outside of it in the forward pass.
    """
    return saved, versions([saved])


def _unchanged(kept: tuple[Tensor, list[int]]) -> Tensor:
    """Return what was kept. Raises RuntimeError where it was changed in place since, as torch does."""
    saved, before = kept
    check_versions([saved], before, "a tensor that a computed parameter needs for its gradient")
    return saved


def _laid(parameter: Tensor, kept: KeptParameter | None) -> Tensor:
    """Return a parameter laid out as it is kept: what torch computes of others it may lay out otherwise."""
    if (
        kept is None
        or not isinstance(parameter, DTensor)
        or parameter.device_mesh != kept.strategy.device_mesh
    ):
        return parameter
    placements = kept.layout.placements("", kept.strategy)
    same: bool = tuple(parameter.placements) == placements
    return parameter if same else parameter.redistribute(placements=placements)


def _alone(parameter: Tensor, kept: KeptParameter) -> Tensor:
    """Return a parameter as it is used, moved by itself, by ops that a compiler knows."""
    (local,) = local_parts([parameter])
    if isinstance(kept.compiled_move, Mover):
        return kept.compiled_move(local, 1, 1)
    if kept.compiled_move is not None:
        (local,) = kept.compiled_move([local])
    return local


def run_opened(use: ParameterUse, run: Callable[[], Any], *, frees: bool, frees_now: bool) -> Any:
    """Return what `run` returns, a tensor or several, run with the parameters of `use` open. Collective.

    Args:
        frees: whether memory that was gathered here may be freed after `run`: the backward pass then gathers it
            again.
        frees_now: whether, with `frees`, it is freed at once; False where the backward pass comes next. Nothing is
            freed inside of a backward pass that computes `run` again.
    """
    if use.is_open:
        return run()
    gathered: list[tuple[GatheredBucket, Tensor]] = []
    with use.open(gathered):
        out = run()
    several = list(out) if isinstance(out, tuple | list) else [out]
    places = [at for at, each in enumerate(several) if isinstance(each, Tensor) and each.requires_grad]
    if not (frees and gathered and places):
        return out
    again = GatherAgain.apply(gathered, *(several[at] for at in places))
    for at, each in zip(places, again, strict=True):
        several[at] = each
    if frees_now and not compat.is_in_backward():
        for _, flat in gathered:
            flat.untyped_storage().resize_(0)
    return type(out)(several) if isinstance(out, tuple | list) else several[0]
