"""`meshweave.prove`: a parallelised model compared with its original, forward and backward."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshweave.base.errors import LayoutError, ProofError, RankLostError, UnsupportedError
from meshweave.execute.ranks.blame import ranks_text
from meshweave.execute.torch.call_order import require_process_group
from meshweave.execute.torch.compat_fsdp import fsdp_ranks
from meshweave.nn.parallel.parameters import ranges_of
from meshweave.nn.prove.differences import Compared, Difference, ProofRanks, filled_from_text
from meshweave.nn.prove.given import Given, LossOf, generated, loss_of, outputs_of, without_ignored
from meshweave.nn.prove.rounding import EXACT, Rounding
from meshweave.nn.prove.runs import ModelRun, context_for, free_bytes, narrowest_seen, settled_gradient
from meshweave.nn.prove.shards import LocalTensor, local_of, rank_groups, ranks_of
from meshweave.nn.prove.state import WIDE, has_external_sync, parameters_of, plain_name, prepared, takes
from meshweave.nn.prove.trail import first_module

NOT_RUN = "the forward or backward pass"
"""What differs where a parallelised model does not run."""
_ABSOLUTE = 1e-4
"""Of the root mean square of the largest gradient: what counts as nothing beside it."""


@dataclass(frozen=True)
class Proof:
    """What `prove` found; true where the models are equal.

    Attributes:
        difference: the first tensor that differs; None where all are equal.
        num_tensors: how many tensors were compared on each rank.
        dtype: the dtype in which the models were run.
        ranks: the ranks that were compared: those of the meshes of parameters and of the data.
        num_ranks: the number of ranks of the world.
    """

    difference: Difference | None
    num_tensors: int
    dtype: torch.dtype
    ranks: tuple[int, ...]
    num_ranks: int

    @property
    def is_equal(self) -> bool:
        """Return whether no tensor differs."""
        return self.difference is None

    def __bool__(self) -> bool:
        return self.is_equal

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        if self.difference is None:
            said = f"equal: {self.num_tensors} tensors in {kind}"
            if len(self.ranks) == self.num_ranks:
                return said
            return f"{said} on {ranks_text(self.ranks)} of {self.num_ranks}; with others: give data_mesh="
        return str(self.difference)

    def require(self) -> Proof:
        """Return this proof. Raises ProofError, which names the tensor, where one differs."""
        if self.difference is not None:
            raise ProofError(str(self.difference))
        return self


def prove(
    model: nn.Module,
    parallelised: Any,
    inputs: Sequence[Any] | Tensor | None = None,
    *,
    loss: LossOf | None = None,
    data_mesh: DeviceMesh | None = None,
    after_backward: Callable[[nn.Module], object] | None = None,
) -> Proof:
    """Compare a parallelised model with its original, on all of its ranks together.

    Compared are, in this order: each rank's part of every parameter and buffer with that part of the original's;
    outputs and loss; the gradient of each parameter, with dropout off; and the bits of gradients on ranks that
    have the same part, so that copies stay equal when an optimizer steps. Both run in double precision where
    memory allows and neither FSDP2, DDP nor a gradient hook of others manages the parameters, else in their own
    type, and then what rounding explains is measured on the original. Weights, gradients, states and random
    numbers are left as they were.

    Args:
        model: the original, whole and with the same weights, on every rank.
        parallelised: what `parallelize` returned, or a module with parameters under the same names: DTensors (of
            `parallelize_module`, `fully_shard`, or both) or plain copies (DDP).
        inputs: what both are called with, equal on all ranks, the batch as first dim; None for generated tokens.
        loss: called with a module and its inputs, returns the loss; None for the cross entropy of logits, or a
            weighted mean of the output where inputs are no tokens.
        data_mesh: the ranks that take rows of their own; None for those of FSDP2 or DDP, else none.
        after_backward: called with the parallelised module after its backward pass: what a training loop does with
            gradients before the optimizer steps, such as sums over ranks.

    Returns:
        A `Proof`, the same on all ranks; its `require()` raises.

    Raises:
        UnsupportedError: the original does not run by itself, is on the meta device or has DTensors, or inputs
            cannot be generated for it.
        LayoutError: `inputs` are empty, or have fewer rows than there are data-parallel ranks.
        BindError: there is no process group.
        RankLostError, DeadlineError: a rank is gone, or does not call this.
    """
    require_process_group()
    given = None if inputs is None else _given(model, inputs, loss)
    return ModelPair(model, parallelised, given, loss, data_mesh, after_backward).proof()


def _given(model: nn.Module, inputs: Sequence[Any] | Tensor, loss: LossOf | None) -> Given:
    values = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if not values:
        raise LayoutError(
            "inputs are empty; give what the model is called with, or none to have them generated"
        )
    first = values[0]
    if loss is None and isinstance(first, Tensor) and not first.is_floating_point() and first.ndim == 2:
        return Given(values, first.roll(-1, 1), loss)
    return Given(values, None, loss)


class ModelPair:
    """A model and its original, and what is needed to compare them.

    Further arguments and errors are those of `prove`.

    Args:
        given: inputs with targets, whose `loss`, `parts` and `part` do not count: they follow from the others;
            None to generate them.
    """

    def __init__(
        self,
        model: nn.Module,
        parallelised: Any,
        given: Given | None = None,
        loss: LossOf | None = None,
        data_mesh: DeviceMesh | None = None,
        after_backward: Callable[[nn.Module], object] | None = None,
    ) -> None:
        self.model, self.made, self.after_backward = model, parallelised, after_backward
        self.module: nn.Module = parallelised if isinstance(parallelised, nn.Module) else parallelised.module
        self.own, self.original = parameters_of(self.module), parameters_of(model)
        tensors = [*self.own.values(), *self.module.buffers()]
        data = _data_ranks(self.module, data_mesh)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        context = context_for(getattr(parallelised, "strategy", None), self.device)
        own, lines = {*ranks_of(tensors), *data}, rank_groups(tensors)
        if len(data) > 1:  # each may be in a mesh of its own
            lines.append(data)
            said = ProofRanks(tuple(sorted(data)), dist.get_rank(), context).say(sorted(own))
            own = {rank for ranks in said.values() for rank in ranks}
        ranks = tuple(sorted(own)) or tuple(range(dist.get_world_size()))
        self.ranks = ProofRanks(ranks, dist.get_rank(), context, lines or [list(ranks)])
        self.ranges = ranges_of(self.module)
        part = data.index(dist.get_rank()) if len(data) > 1 else 0
        for name, parameter in self.original.items():
            if parameter.is_meta or isinstance(parameter, DTensor):
                what = "has no memory" if parameter.is_meta else "is spread over ranks"
                raise UnsupportedError(
                    f"{name} of the original {what}; give the whole model with its weights, copied before it is "
                    "parallelised in place"
                )
        given = given or generated(model, len(ranks), self.device, None)
        rows = [len(each) for each in given.inputs if isinstance(each, Tensor) and each.ndim]
        if rows and min(rows) < len(data):
            raise LayoutError(
                f"inputs have {min(rows)} rows, for {len(data)} data-parallel ranks with a row each"
            )
        self.given = replace(given, loss=loss, parts=max(1, len(data)), part=part)
        self.num_tensors, self.dtype, self.training = 0, next(model.parameters()).dtype, True

    def proof(self) -> Proof:
        """Compare the models and return the proof, the same on all ranks. Collective."""
        difference = self._first(self._parameters())
        if difference is not None:
            difference = self._named(difference)
        else:
            difference = self._runs()
        return Proof(difference, self.num_tensors, self.dtype, self.ranks.ranks, dist.get_world_size())

    def _named(self, difference: Difference) -> Difference:
        """Return the difference of a parameter with what it is instead, where that is another one, or rounded."""
        name = difference.what
        actual = self.own.get(name)
        local = None if actual is None else local_of(actual, self.ranks.rank, self.ranges.get(name))
        said = self.ranks.say("" if local is None else filled_from_text(local, name, self.original))[
            difference.rank
        ]
        return replace(difference, cause=said) if said else difference

    def _first(self, compared: list[Compared]) -> Difference | None:
        self.num_tensors += len(compared)
        return self.ranks.first_difference(compared)

    # --- parameters and buffers ----------------------------------------------------------------------------

    def _parameters(self) -> list[Compared]:
        """Return parameters and buffers beside those of the original, which they equal in each bit."""
        items = []
        own, original = {**self.own}, {**self.original}
        own |= {plain_name(name): each for name, each in self.module.named_buffers(remove_duplicate=False)}
        original |= {
            plain_name(name): each for name, each in self.model.named_buffers(remove_duplicate=False)
        }
        for name in [*original, *(name for name in own if name not in original)]:
            is_parameter = name in self.original or name in self.own
            if not is_parameter and (name not in own or name not in original or original[name].is_meta):
                continue  # buffers, such as masks, may be made anew
            actual, wanted = own.get(name), original.get(name)
            local = None if actual is None else local_of(actual, self.ranks.rank, self.ranges.get(name))
            if local is not None and wanted is not None:
                wanted = wanted.detach().to(local.values.dtype)
            items.append(
                Compared(name if is_parameter else f"buffer {name}", local, wanted, hint=_OTHER_WEIGHTS)
            )
        return items

    # --- running -------------------------------------------------------------------------------------------

    def _runs(self) -> Difference | None:
        fits = self._fits()
        if fits and self.dtype.is_floating_point and not has_external_sync(self.module):
            right, _ = self._tried(lambda: self._run_original(WIDE))
            if right is not None and right.drew and self.training:
                self.training = (
                    False  # something random is no dropout: without it there is something to compare
                )
                right, _ = self._tried(lambda: self._run_original(WIDE))
            if right is not None:
                made, _ = self._tried(lambda: self._run_made(WIDE))
                if made is not None:
                    self.dtype = WIDE
                    return self._compare(WIDE, made, right, None)
        return self._run_in_own_type(fits)

    def _run_in_own_type(self, fits: bool) -> Difference | None:
        """Compare runs in the models' own type; what rounding does is measured on the original."""
        own, failed = self._tried(lambda: self._run_original(None))
        if own is None:
            rank = min(failed)
            raise UnsupportedError(
                f"{type(self.model).__name__} itself does not run on rank {rank}, so that nothing can be compared "
                f"with it: {failed[rank]}; give inputs= and loss="
            )
        made, failed = self._tried(lambda: self._run_made(None))
        if made is None:
            where = min(failed)
            return Difference(NOT_RUN, where, "the whole", math.nan, 0.0, failed[where])
        if torch.finfo(made.narrowest).bits < torch.finfo(self.dtype).bits:  # products in half precision
            self.dtype = made.narrowest
            # As FSDP2 has it: buffers, such as frequencies, stay as they are. Not every model runs so.
            own, _ = self._tried(lambda: self._run_original(made.narrowest, casts_buffers=False))
            if own is None:
                own, _ = self._tried(lambda: self._run_original(made.narrowest))
        wide = (
            WIDE if fits else torch.float32 if torch.finfo(self.dtype).bits <= 16 and self._fits(12) else None
        )
        right = self._tried(lambda: self._run_original(wide))[0] if wide is not None else None
        if own is None or right is None:
            right, own = own or right, None
        assert right is not None
        return self._compare(None, made, right, own)

    def _tried(self, run: Callable[[], ModelRun]) -> tuple[ModelRun | None, dict[int, str]]:
        """Return a run; None where any rank failed, and what the ranks that did say."""
        error: Exception | None = None
        made = None
        try:
            made = run()
        except RankLostError:
            raise
        except Exception as caught:
            error = caught
        failed = self.ranks.failures(error)
        return (None if failed else made), failed

    def _fits(self, bytes_each: int = 24) -> bool:
        """Return whether all ranks of this host have memory for the original: by default in double precision."""
        numbers = sum(parameter.numel() for parameter in self.model.parameters())
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", len(self.ranks.ranks)))
        return all(
            self.ranks.say(bool(bytes_each * numbers * ranks < 0.7 * free_bytes(self.device, ranks))).values()
        )

    def _run_original(self, dtype: torch.dtype | None, casts_buffers: bool = True) -> ModelRun:
        with prepared(self.model, dtype, training=self.training, casts_buffers=casts_buffers):
            before = torch.get_rng_state()
            parts = self.given.parts
            values: dict[str, Tensor] = {}
            for part in range(parts):
                actual = outputs_of(self.model, self.given.rows(part).cast(dtype))
                (actual["loss"] / parts).backward()
                if part == self.given.part:
                    values = {name: value.detach() for name, value in actual.items()}
            drew = not torch.equal(before, torch.get_rng_state())
            return ModelRun(values, {n: p.grad for n, p in parameters_of(self.model).items()}, drew)

    def _run_made(self, dtype: torch.dtype | None) -> ModelRun:
        with prepared(self.module, dtype, self.made, self.training), narrowest_seen() as seen:
            before = torch.get_rng_state()
            given = self.given.rows(self.given.part).cast(dtype)
            if self.made is self.module or given.loss is not None:
                values = outputs_of(self.module, given)
            else:
                tokens, targets = given.inputs[0], given.targets
                with torch.no_grad():
                    values = {"logits": self.made.logits(tokens)}
                    if takes(self.model.forward, "labels"):
                        values["loss of labels"] = self.module(tokens, labels=targets).loss
                    elif targets is not None:  # that of other targets, which are compared in `loss`
                        values["loss of targets"] = loss_of(values["logits"], without_ignored(targets))
                values["loss"] = self.made.loss(tokens, targets)
            values["loss"].backward()
            if self.after_backward is not None:
                self.after_backward(self.module)
            drew = not torch.equal(before, torch.get_rng_state())
            grads = {name: settled_gradient(p) for name, p in parameters_of(self.module).items()}
            return ModelRun({name: value.detach() for name, value in values.items()}, grads, drew, seen[0])

    def _compare(
        self, dtype: torch.dtype | None, made: ModelRun, right: ModelRun, own: ModelRun | None
    ) -> Difference | None:
        rounding = Rounding(self.dtype, right, own)
        values = [
            Compared(
                name,
                LocalTensor(made.values[name], None, self.given.part),
                right.values[name],
                *rounding.allowed(name),
                hint=self.given.loss_hint(name) if name.startswith("loss") else "",
            )
            for name in ("logits", "output", "loss of labels", "loss of targets", "loss")
            if name in made.values and name in right.values
        ]
        difference = self._first(values)
        if difference is not None:
            if made.drew and not right.drew:
                return replace(difference, cause="random numbers are drawn: dropout is active")
            return first_module(self, dtype, difference)
        return self._first(self._gradients(made, right, rounding))

    def _gradients(self, made: ModelRun, right: ModelRun, rounding: Rounding) -> list[Compared]:
        """Return the gradients beside those of the original, the last parameter's first, as they are computed."""
        largest = max((float(g.square().mean()) for g in right.grads.values() if g is not None), default=0.0)
        floor = _ABSOLUTE * math.sqrt(largest)
        items = []
        for name in reversed([*self.original, *(each for each in self.own if each not in self.original)]):
            actual, wanted = made.grads.get(name), right.grads.get(name)
            local = None if actual is None else local_of(actual, self.ranks.rank, self.ranges.get(name))
            allowed, _ = rounding.allowed(name)
            eps = EXACT if self.dtype == WIDE else torch.finfo(self.dtype).eps
            items.append(
                Compared(
                    f"gradient of {name}",
                    local,
                    wanted,
                    allowed,
                    floor * eps,
                    self.dtype == WIDE or self.device.type == "cpu",  # sums of CUDA may have no order
                    self._untied(name),
                )
            )
        return items

    def _untied(self, name: str) -> str:
        """Return a hint where a tensor that the original has under two names is two in the parallelised model."""
        alike = [each for each, p in self.original.items() if p is self.original.get(name) and each != name]
        if alike and self.own.get(alike[0]) is self.own.get(name):
            return f"{name} and {alike[0]} are one tensor: the gradient of one of its uses may be missing"
        if alike and any(self.own.get(each) is not self.own.get(name) for each in alike):
            return (
                f"{name} and {alike[0]} are one tensor in the original and two here, each with a part of it"
            )
        return ""


_OTHER_WEIGHTS = "it was changed, or filled from other weights"


def _data_ranks(module: nn.Module, data_mesh: DeviceMesh | None) -> list[int]:
    """Return the ranks that have rows of their own and differ from this one in nothing else."""
    if data_mesh is not None:
        return [int(rank) for rank in data_mesh.mesh.flatten().tolist()]
    for child in module.modules():
        if isinstance(child, nn.parallel.DistributedDataParallel):
            return list(dist.get_process_group_ranks(child.process_group))
    return fsdp_ranks(module)
