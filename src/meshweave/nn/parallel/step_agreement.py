"""What ranks compare in each call of a parallelised model, before anything else of it travels.

A number of 64 bits stands for all that ranks must have alike in a call: tokens, targets, modes, the generator of
dropout, how many steps were taken. Its greatest and least are one all-reduce of 16 bytes, which runs beside the
call until its first program that communicates, or its end. Where nothing travels before the loss, as in data
parallelism, it is sent with the terms of the loss. The first call and each `debug_every`-th compare more: settings
of torch, modes of modules, copies of weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshweave.base.errors import BindError, LayoutError, MeshweaveError
from meshweave.execute.ranks.blame import ranks_text
from meshweave.execute.torch.call_order import CallOrder, call_order
from meshweave.execute.torch.call_records import mark_as_shared
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.counted import gathered
from meshweave.nn.parallel.agreed import Words, agree
from meshweave.nn.parallel.call_facts import CallFacts, CallInputs, GivenTensor
from meshweave.nn.parallel.checksums import bits_number, checksum, digest_of
from meshweave.nn.parallel.model_words import copy_words, parameter_words, setting_words
from meshweave.nn.parallel.reports import ModelSettings
from meshweave.nn.parallel.tokens import TokenLimits

_STRIDE = 0x9E3779B97F4A  # even, so that factors are odd: targets that are tokens count, too
_WHAT = "all ranks to compare what they give a parallelised model"
_NOT_ALIKE = "numbers of ranks differ, and nothing that they stand for"
_SHOWN = 6
_IS_TRAINING = attrgetter("training")


@dataclass
class Progress:
    """How far a model has been trained on this rank.

    Attributes:
        calls: forward calls so far.
        steps: steps so far of all optimizers that hold its parameters.
        options: the settings of these optimizers at their last steps, as text by name.
    """

    calls: int = 0
    steps: int = 0
    options: dict[str, str] = field(default_factory=dict)


class StepAgreement:
    """The comparisons, in each call of one model, of what its ranks must have the same.

    Args:
        module: the model, parallelised.
        settings: each `debug_every`-th call compares all that the first one does; 0 for the first alone.
        limits: which tokens and targets the model takes.
        draws: whether ranks must have torch's generator in the same state where the model trains.

    Attributes:
        number: distinguishes the model from others of the same ranks; equal on all of them.
        is_stage: whether the model has only some of the layers, as a stage of a pipeline.
    """

    def __init__(self, module: nn.Module, settings: ModelSettings, limits: TokenLimits, draws: bool) -> None:
        self.module, self.strategy, self.limits, self.draws = module, settings.strategy, limits, draws
        self.recompute, self.debug_every = settings.recompute, settings.debug_every
        self.progress, self.number = Progress(), 0
        self.is_stage = False
        self._children = list(module.modules())
        self._joint: JointMessage | None = None

    def context(self, device: torch.device) -> TorchContext:
        """Return the context in which the ranks of the strategy communicate for tensors on `device`."""
        return self.strategy.context(device)

    @contextlib.contextmanager
    def beside(
        self, tokens: Tensor | None, inputs: CallInputs, refused: MeshweaveError | None = None
    ) -> Iterator[None]:
        """Compare what ranks give a call, and check it against the model's limits; the call runs in the block.

        Collective. A number that stands for what a rank gives is sent beside the call, and compared before the
        call communicates otherwise: a rank waits for the others where the call has it wait anyway. The first
        call and each `debug_every`-th wait at once. Where the call communicates nothing before its loss, the
        number is sent with the loss; errors then come where the loss is read, in the backward pass, or in the
        next call.

        Args:
            tokens: all of them, as the call is given them; None where it is given no tensor.
            inputs: what it is given beside tokens.
            refused: why this rank refuses its arguments; None if it takes them.

        Raises:
            LayoutError: ranks differ, or tokens or targets do not fit the model: on all ranks.
            MeshweaveError: `refused` itself, where all ranks refuse for that reason.
            RankLostError, DeadlineError, BindError: other ranks are missing, late, or in another call.
        """
        self.progress.calls += 1
        order = None if self.strategy.is_alone else self._order()
        try:
            if order is not None:
                self._begin(order, tokens, inputs, refused)
                if self._is_whole or refused is not None:
                    order.finish_open()
            if refused is not None:
                raise refused
            with torch.no_grad():
                if problem := self.limits.problem(tokens, inputs.targets):
                    raise LayoutError(problem)
            yield
        finally:
            joint, self._joint = self._joint, None
            if order is not None and (joint is None or joint.is_unsent):
                order.finish_open()  # else it is waited for where its sum is looked at, or something else travels

    def _order(self) -> CallOrder:
        """Return the order of calls of the context in which programs run, on the current device."""
        kind = self.strategy.device_mesh.device_type
        here = torch.device(kind) if kind == "cpu" else torch.empty(0, device=kind).device
        return call_order(self.context(here))

    def _begin(
        self, order: CallOrder, tokens: Tensor | None, inputs: CallInputs, refused: MeshweaveError | None
    ) -> None:
        """Say what this rank gives a call, and compare it before the next call of this context."""
        tensors = {"tokens": tokens, "targets": inputs.targets, **inputs.tensors}
        facts = self._facts(tensors, inputs, refused)
        is_whole = self._is_whole

        def conclude(is_same: bool) -> None:
            if is_same and not is_whole:
                return
            with torch.no_grad():
                given = {name: _values(tensor) for name, tensor in tensors.items()}
                words = facts.words
                every = words | {name: {**words[name], **values} for name, values in given.items()}
                try:
                    self.compare(every | (self._all_words() if is_whole else {}))
                except LayoutError:
                    self.progress.calls -= 1  # it is none, on all ranks: also where it was of another model
                    raise

        with torch.no_grad():
            number = _number(facts, [*tensors.values()])
            if self.strategy.only_splits_batch and self.strategy.device_mesh.device_type == "cpu":
                order.finish_open()  # that of a call which this one runs inside of
                self._joint = JointMessage(self, order, int(number), conclude)
            else:
                answer = self._sent(order, number)

                def finish() -> None:
                    is_same = answer()
                    conclude(is_same)
                    assert is_same, _NOT_ALIKE

                order.leave_open(finish)

    def sum_beside(self, term: Tensor, take: Callable[[float], object]) -> Callable[[], None] | None:
        """Begin to sum `term`, a tensor () of each rank, in one message with what the running call compares.

        Return a function that waits until `take` has been called with the sum; the next call of these ranks waits,
        too. Return None where the call's number was sent already, or the call compares none: the caller then sums
        the terms.
        """
        joint = self._joint
        return None if joint is None or not joint.is_unsent else joint.begin(float(term.detach()), take)

    @property
    def _is_whole(self) -> bool:
        """Return whether the present call compares all that there is."""
        calls = self.progress.calls
        return calls == 1 or (self.debug_every > 0 and calls % self.debug_every == 0)

    def _sent(self, order: CallOrder, number: Any) -> Callable[[], bool]:
        """Send a number; return what waits and says whether those of all ranks are equal."""
        number = torch.as_tensor(number, device=self.strategy.device_mesh.device_type)
        both = torch.stack((number, ~number))
        wait = self.reduced(order, both, dist.ReduceOp.MAX)

        def answer() -> bool:
            wait()
            greatest, least = both.tolist()
            return bool(greatest == ~least)

        return answer

    def reduced(self, order: CallOrder, values: Tensor, op: Any) -> Callable[[], None]:
        """Begin an all-reduce of `values` over the ranks, in place; return a function that waits for the result.

        Args:
            order: counts the calls that all ranks make in the same order, of which this is one more.
            values: a tensor of this rank.
            op: torch's, such as `ReduceOp.SUM`.
        """
        ranks = self.strategy.mesh.ranks
        context, sequence = self.context(values.device), order.sequence(ranks)
        group = context.group_of(ranks)
        others = [rank for rank in ranks if rank != self.strategy.rank]
        with sequence.agreement(_WHAT), _explained(order):
            work = dist.all_reduce(values, op=op, group=group, async_op=True)

        def wait() -> None:
            with sequence.resume(), context.guard(_WHAT, others) as guard, _explained(order):
                work.wait(guard.timeout)

        return wait

    def _all_words(self) -> dict[str, Mapping[str, str]]:
        named = list(self.module.named_parameters())
        modes = {f"{name}.training": str(child.training) for name, child in self.module.named_modules()}
        return {
            "parameters": parameter_words(self.module),
            "settings": setting_words(),
            "modules in training": modes,
            **copy_words("copies", named),
        }

    def _facts(
        self, tensors: Mapping[str, Tensor | None], inputs: CallInputs, refused: MeshweaveError | None
    ) -> CallFacts:
        """Return what ranks must have alike in this call but for the values of tensors."""
        device, progress = self.strategy.device_mesh.device_type, self.progress
        autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "off"
        is_training = bool(self.module.training)
        modes = (
            ("training", is_training),
            ("modules in training", sum(map(_IS_TRAINING, self._children))),
            ("gradients", torch.is_grad_enabled()),
            ("autocast", autocast),
            ("recompute", bool(self.recompute)),
        )
        kept = "kept from before" if self._has_gradients() else "none from before"
        steady = (
            ("arguments of a call", (("refused", str(refused or "nothing")), *inputs.facts)),
            *((name, (("shape", GivenTensor.of(tensor)),)) for name, tensor in tensors.items()),
            ("modes", modes),
            ("progress", (("gradients", kept), *progress.options.items())),
            ("model", (("number", self.number),)),
        )
        draws = self.draws and is_training
        generator = digest_of(torch.get_rng_state()) if draws else None
        return CallFacts(steady, progress.calls, progress.steps, generator)

    def _has_gradients(self) -> bool:
        first = next((p for p in self.module.parameters() if p.requires_grad), None)
        return first is not None and first.grad is not None

    def compare(self, words: Words, what: str = _WHAT) -> None:
        """Raise LayoutError, on all ranks of the model, where words under a common subject differ. Collective.

        Args:
            words: this rank's, {subject: {name of a thing: text}}; a subject that other ranks lack is not
                compared.
            what: completes "waiting for ..." in errors.
        """
        device = torch.device(self.strategy.device_mesh.device_type)
        agree(self.context(device), self.strategy.mesh.ranks, words, what)


class JointMessage:
    """What a call compares, sent with the terms of its loss, as nothing else travels before.

    It is one all-reduce of two numbers in float64: the term, and some bits of what is compared. Where these bits
    are equal on all ranks, their sum is those of this rank times the number of ranks; where not, each rank sees
    another sum, but for chances of one in 2^40.

    It is sent without a term where another call comes first, or the call ends without a loss; its lowest bit
    then differs from that of ranks with a term. Where it was sent with a term, it is waited for where the sum is
    read, in the backward pass before gradients are sent, or by the next call.

    Args:
        number: stands for what is compared; lower bits of it are sent.
        conclude: called with whether the numbers of all ranks are equal; if not, it raises LayoutError, naming
            what differs.
    """

    _EXACT_BITS = 53
    """Up to as many bits float64 has whole numbers."""

    def __init__(
        self, agreement: StepAgreement, order: CallOrder, number: int, conclude: Callable[[bool], None]
    ) -> None:
        self._agreement, self._order, self._conclude = agreement, order, conclude
        self._ranks = agreement.strategy.mesh.ranks
        self._number = number % 2 ** (self._EXACT_BITS - len(self._ranks).bit_length())
        self._unsent = order.leave_open(self._finish)

    @property
    def is_unsent(self) -> bool:
        """Return whether the message is yet to be sent: with a loss, or else before the next call."""
        return self._order.open is self._unsent

    def _finish(self) -> None:
        """Send it without a term, and compare."""
        self.begin(None, lambda _: None)()

    def begin(self, term: float | None, take: Callable[[float], object]) -> Callable[[], None]:
        """Send this rank's `term` of the loss (None for no loss) in the message; return a function that waits.

        The returned function compares, and calls `take` with the sum of the terms. It raises LayoutError where
        ranks differ, and BindError where other ranks have ended the call without a loss.
        """
        self._order.open = None
        number = self._number ^ int(term is None)
        both = torch.tensor([term or 0.0, number], dtype=torch.float64, device="cpu")
        wait = self._agreement.reduced(self._order, both, dist.ReduceOp.SUM)

        def finish() -> None:
            wait()
            is_same = float(both[1]) == number * len(self._ranks)
            self._conclude(is_same)
            if not is_same:
                self._check_terms(term is not None)
            take(float(both[0]))

        return self._order.leave_open(finish).end

    def _check_terms(self, has_term: bool) -> None:
        """Raise BindError where this rank has a term, and others have none."""
        context = self._agreement.context(torch.device("cpu"))
        said = gathered(torch.tensor([int(has_term)], device="cpu"), context, self._ranks, _WHAT)
        lacks = [
            rank for rank, is_there in zip(self._ranks, said.flatten().tolist(), strict=True) if not is_there
        ]
        assert 0 < len(lacks) < len(self._ranks), _NOT_ALIKE
        if has_term:
            error = BindError(
                f"{ranks_text(lacks)} ended this call of a parallelised model without its loss: see its error"
            )
            mark_as_shared(error)
            raise error


@contextlib.contextmanager
def _explained(order: CallOrder) -> Iterator[None]:
    """Raise BindError where torch fails inside because calls are out of order."""
    try:
        yield
    except RuntimeError:
        order.explain_failure()
        raise


def _number(facts: CallFacts, tensors: Sequence[Tensor | None]) -> Any:
    """Return a number that stands for facts and the values of tensors: a tensor where some are not on a CPU."""
    number, elsewhere = facts.number, []
    sums: dict[int, Tensor | int] = {}  # tokens are often their own targets
    for at, given in enumerate(tensors):
        if given is not None and not given.is_meta:
            if (own := sums.get(id(given))) is None:
                own = sums[id(given)] = bits_number(given)
            factor = 1 + at * _STRIDE
            if isinstance(own, int):
                number += own * factor
            else:
                elsewhere.append(own * factor)
    return sum(elsewhere, (number + 2**63) % 2**64 - 2**63)


def _values(given: Tensor | None) -> dict[str, str]:
    """Return the first values of tokens or targets, and the checksum of all."""
    if given is None or given.is_meta:
        return {}
    first = ", ".join(map(str, given.flatten()[:_SHOWN].tolist()))
    return {"the first values": first, "the values": f"#{int(checksum(given)):x}"}
