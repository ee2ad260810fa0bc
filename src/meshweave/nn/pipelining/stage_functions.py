"""The parts of a stage, a torch module, as functions that the calls of a program run (`execute.calls`).

The forward builds an autograd graph from copies of what arrived, and keeps it in the stash. An input
gradient and a weight gradient take the graph apart with the functions that torch's own stages use
(`compat_pipelining`); a whole backward runs it at once. Gradients of parameters add up in their `.grad`.

What one rank alone has is not in the program's buffers: the batch, targets, losses and outputs are in a
`StageStep`, parameters and their gradients in the module. Their buffers in the program hold one element, or
the gradients of all parameters where several data-parallel ranks add them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.base.errors import LayoutError
from meshweave.execute.torch.call_records import is_of_distributed
from meshweave.execute.torch.compat_pipelining import (
    is_view,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from meshweave.nn.dtensor import kind_text
from meshweave.nn.pipelining.gradients import LossSum
from meshweave.nn.pipelining.missed_gradients import reached_parameters, require_all
from meshweave.nn.pipelining.run_again import ForwardState
from meshweave.nn.pipelining.saved_memory import SavedMemory
from meshweave.nn.saved_versions import versions

LossFunction = Callable[..., Tensor]
"""(output, target) of a micro-batch -> a scalar."""


@dataclass(frozen=True)
class TensorKind:
    """Shape and dtype of a tensor, on one rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorKind:
        """Return the shape and dtype of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


@dataclass
class StageStep:
    """What one step gives to a stage, and takes from it. Indices and keys count micro-batches.

    Attributes:
        batch: of the first stage, the tensors of each micro-batch.
        targets: of the last stage, one for each micro-batch; empty where there is no loss.
        losses: of the last stage.
        outputs: of the last stage what the module returned; None if that is not wanted.
    """

    batch: Sequence[tuple[Tensor, ...]] = ()
    targets: Sequence[Tensor] = ()
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] | None = None


@dataclass(frozen=True)
class StageShape:
    """What a stage takes and makes, on one rank.

    Attributes:
        number: of the stage.
        num_rows: rows of a micro-batch that this rank has.
        ins: the tensors that arrive, one for each of `sources`; none for the first stage.
        outs: the tensors that are passed on, one for each of `targets`; none for the last stage.
        sources, targets: the numbers of the stages that they come from and go to.
    """

    number: int
    num_rows: int = 1
    ins: tuple[TensorKind, ...] = ()
    outs: tuple[TensorKind, ...] = ()
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()


class StageFunctions:
    """The forward and backward parts of one stage, as functions that the calls of a program run.

    Attributes:
        refuses_missed: whether the next backward in two parts raises UnsupportedError for a parameter whose
            gradient it misses: true until one has missed none.

    Args:
        module: the stage.
        shape: what it takes and makes.
        loss_fn: of the last stage; None where only outputs are wanted.
        whole_backwards: micro-batches whose input and weight gradients are one action.
        trains: whether any backward follows.
        losses: the sum to which losses are added; None for none.
        memory: counts the bytes that are kept; None counts nothing.
        recomputes: whether the forward keeps only its inputs, and runs again before the backward.
        has_signals: whether stages send one byte in place of each tensor, which counts as zeros where it arrives.
    """

    def __init__(
        self,
        module: nn.Module,
        shape: StageShape,
        loss_fn: LossFunction | None,
        whole_backwards: Iterable[int],
        *,
        trains: bool = True,
        losses: LossSum | None = None,
        memory: SavedMemory | None = None,
        recomputes: bool = False,
        has_signals: bool = False,
    ) -> None:
        self.module, self.shape, self.loss_fn = module, shape, loss_fn
        self.whole_backwards, self.trains = frozenset(whole_backwards), trains
        self.losses = losses
        self.memory, self.recomputes, self.has_signals = memory, recomputes, has_signals
        self.step, self.refuses_missed = StageStep(), True
        self._changing: set[str] | None = None  # buffers that a forward has changed; all until one has run
        if memory is not None:
            memory.exclude(module)

    @property
    def is_first(self) -> bool:
        """Return whether the stage reads the batch: no other stage sends to it."""
        return not self.shape.sources

    @property
    def is_last(self) -> bool:
        """Return whether the stage makes the output: it sends to no other stage."""
        return not self.shape.targets

    def calls(self) -> dict[str, Callable[..., Any]]:
        """Return the functions of the stage by the names that `call` ops of the program carry."""
        name = f"stage{self.shape.number}"
        return {
            name: self.forward,
            f"{name}_recompute": self.recompute,
            f"{name}_input_grad": self.input_grad,
            f"{name}_weight_grad": self.weight_grad,
            f"{name}_backward": self.backward,
        }

    # --- forward ---------------------------------------------------------------------------------------------

    def forward(self, stash: dict[str, Any], *operands: Any) -> list[Tensor]:
        """Run the module on a micro-batch; return the tensors for other stages, and keep the graph in `stash`.

        The last stage returns zeros (rows, 1); with signals the others return one byte for each tensor.
        `operands` are the tensors that arrived, a token that only orders calls, and the micro-batch's number.

        Raises LayoutError where outputs are not those of `shape`, or a stage that recomputes changes its inputs.
        """
        *arrived, token, micro_batch = operands
        inputs = self._inputs(arrived[: len(self.shape.ins)], micro_batch)
        if self.recomputes and self.trains:
            state, before = ForwardState(self.module, inputs, self._changing), versions(inputs)
            stash["inputs"], stash["state"] = inputs, state
            with torch.no_grad():
                outputs = self._run(inputs, micro_batch)
            if versions(inputs) != before:
                raise LayoutError(
                    f"stage {self.shape.number} changes its inputs in place, and is to run on them again: "
                    "leave it out of recompute, or let it work on a copy"
                )
            self._changing = {*(self._changing or ()), *state.keep_changed()}
            stash["kept"] = self._keep(inputs)
            self._count()
            self._note(outputs, micro_batch)
            return self._passed_on(outputs, arrived, token)
        with torch.set_grad_enabled(self.trains), self._hooks():
            outputs = self._run(inputs, micro_batch)
        self._note(outputs, micro_batch)
        if self.trains:
            stash["inputs"], stash["outputs"] = inputs, outputs[-1:] if self.is_last else outputs
            stash["kept"] = self._keep([*inputs, *stash["outputs"]])
            self._count()
        return self._passed_on(outputs, arrived, token)

    def recompute(self, stash: dict[str, Any], *operands: Any) -> None:
        """Run the module again on `stash`'s inputs with the forward's random numbers; keep its outputs there.

        `operands` end with the micro-batch's number; nothing else of them is read.
        """
        inputs = stash["inputs"]
        with torch.enable_grad(), self._hooks(), stash.pop("state").restored():
            outputs = self._run(inputs, operands[-1])
        stash["kept"].release()
        stash["outputs"] = outputs[-1:] if self.is_last else outputs
        stash["kept"] = self._keep([*inputs, *stash["outputs"]])
        self._count()

    def _inputs(self, arrived: Sequence[Tensor], micro_batch: int) -> list[Tensor]:
        """Return the module's inputs as leaves of a graph. What arrived is copied: its buffer is used again."""
        if self.is_first:
            return list(self.step.batch[micro_batch])
        if self.has_signals:
            made = self._zeros(self.shape.ins)
        else:
            made = [value.clone() for value in arrived]
        return [value.requires_grad_(self.trains) for value in made]

    def _run(self, inputs: Sequence[Tensor], micro_batch: int) -> list[Tensor]:
        """Return the outputs of the module; of the last stage with a loss the outputs and the loss."""
        made = self.module(*inputs)
        outputs = list(made) if isinstance(made, (tuple, list)) else [made]
        if not self.is_last:
            self._check(outputs)
            # torch takes the graph apart by detaching outputs in place, which a view does not allow.
            return [out.clone() if is_view(out) else out for out in outputs]
        if self.loss_fn is None or not len(self.step.targets):
            return outputs
        loss = self.loss_fn(made, self.step.targets[micro_batch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise LayoutError(
                f"the loss_fn returns {kind_text(loss)}; it must return a tensor of one element"
            )
        return [*outputs, loss.sum() if loss.ndim or is_view(loss) else loss]

    def _check(self, outputs: Sequence[Any]) -> None:
        """Raise LayoutError where outputs are not what the stages after this one expect."""
        number, expected = self.shape.number, self.shape.outs
        if len(outputs) != len(expected):
            raise LayoutError(
                f"stage {number} returns {len(outputs)} tensors, and goes on to stages "
                f"{', '.join(map(str, self.shape.targets))}: it must return one for each, in this order"
            )
        for out, kind, target in zip(outputs, expected, self.shape.targets, strict=True):
            if not isinstance(out, Tensor) or TensorKind.of(out) != kind:
                made = TensorKind.of(out) if isinstance(out, Tensor) else type(out).__name__
                said = f"stage {number} returns {made} for stage {target}, which expects {kind}"
                if isinstance(made, TensorKind) and made.shape == kind.shape:
                    said += f", as it does without autocast: let it, or give outputs={{{number}: [examples]}}"
                raise LayoutError(said)

    def _note(self, outputs: Sequence[Tensor], micro_batch: int) -> None:
        """Hand the loss, and outputs if wanted, of the last stage to the step."""
        if not self.is_last:
            return
        has_loss = self.loss_fn is not None and len(self.step.targets) > 0
        if has_loss:
            self.step.losses[micro_batch] = outputs[-1].detach()
            if self.losses is not None:
                self.losses.add(self.step.losses[micro_batch])
        if self.step.outputs is not None:
            values = [out.detach() for out in (outputs[:-1] if has_loss else outputs)]
            self.step.outputs[micro_batch] = values[0] if len(values) == 1 else tuple(values)

    def _passed_on(self, outputs: Sequence[Tensor], arrived: Sequence[Tensor], token: Tensor) -> list[Tensor]:
        """Return what the program carries: outputs; one byte for each; or, of the last stage, zeros per row."""
        if self.has_signals:
            return [torch.zeros(1, dtype=torch.uint8) for _ in self.shape.outs] or [self._rows(token)]
        return [out.detach() for out in outputs] if not self.is_last else [self._rows(token)]

    def _rows(self, token: Tensor) -> Tensor:
        return torch.zeros(self.shape.num_rows, 1, dtype=torch.float32, device=token.device)

    # --- backward ----------------------------------------------------------------------------------------------

    def input_grad(self, stash: dict[str, Any], *operands: Any) -> list[Tensor]:
        """Return the gradients of the tensors that arrived, none at the first stage.

        With signals there is one byte for each. For one of `whole_backwards` those of parameters are added to
        their `.grad`, too; else the rest of the graph stays in `stash` for `weight_grad`. `operands` are the
        gradients of the tensors that the forward sent, a token that only orders calls, and the micro-batch's
        number.

        Raises UnsupportedError, in the first backward in two parts, where it misses the gradient of a parameter;
        LayoutError where the loss has no gradient.
        """
        *grads, _, micro_batch = operands
        inputs, outputs = stash["inputs"], stash.pop("outputs")
        if self.is_last and not outputs[0].requires_grad:
            raise LayoutError(
                "the loss has no gradient: loss_fn must compute it from what the last stage returns"
            )
        arrived = self._arrived_grads(grads)
        if micro_batch in self.whole_backwards:
            made = self._whole(outputs, arrived, inputs)
            del stash["inputs"]
            stash.pop("kept").release()
        elif self.is_first:
            # Nothing asks for gradients of the batch: all of the backward is the weight gradient's.
            stash["outputs"], stash["grads"] = outputs, arrived
            made = ()
        else:
            made = self._split(stash, outputs, arrived, inputs)
            del outputs, arrived
            self._count()
        if self.has_signals:
            return [torch.zeros(1, dtype=torch.uint8) for _ in self.shape.ins]
        return [
            torch.zeros(kind.shape, dtype=kind.dtype, device=value.device) if grad is None else grad
            for grad, kind, value in zip(made, self.shape.ins, inputs, strict=False)
        ]

    def backward(self, stash: dict[str, Any], *operands: Any) -> list[Tensor]:
        """Run a whole backward: return the gradients of the tensors that arrived, then `total` as it was given.

        Gradients of parameters have been added to their `.grad`. `operands` are those of `input_grad`, with
        `total` of `weight_grad` before the micro-batch's number.
        """
        *before, total, micro_batch = operands
        return [*self.input_grad(stash, *before, micro_batch), total]

    def weight_grad(self, stash: dict[str, Any], *operands: Any) -> Tensor:
        """Add the gradients of parameters to their `.grad`; do nothing where a whole backward has done it.

        `operands` begin with `total`, which is returned as it is, and end with the micro-batch's number.
        """
        total, micro_batch = operands[0], operands[-1]
        if micro_batch in self.whole_backwards:
            return total
        with torch.enable_grad(), _unwrapped_errors():
            if self.is_first:
                self._whole(stash.pop("outputs"), stash.pop("grads"), stash["inputs"])
            else:
                first = [parameter for parameter in self._parameters() if parameter.grad is None]
                stage_backward_weight()(self._parameters(), stash.pop("groups"))
                for each in first:  # torch adds to them in place, and may have one tensor for several of them
                    each.grad = None if each.grad is None else each.grad.clone()
        stash.pop("kept").release()
        return total

    def _split(
        self, stash: dict[str, Any], outputs: list[Tensor], grads: Any, inputs: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        reached = reached_parameters(self.module, outputs) if self.refuses_missed else {}
        with torch.enable_grad(), _unwrapped_errors():
            made, groups = stage_backward_input()(outputs, grads, inputs, self._parameters())
        require_all(reached, groups, self.shape.number)
        self.refuses_missed = False
        for value in inputs:
            value.grad = None  # torch keeps it here, too, for as long as the graph lives
        stash["groups"] = groups
        stash["kept"].release()
        arrived = [grad for group in groups for each in group.get("grads") or () for grad in each or ()]
        stash["kept"] = self._keep([*inputs, *(grad for grad in arrived if grad is not None)])
        gradients: tuple[Tensor | None, ...] = made
        return gradients

    def _whole(self, outputs: list[Tensor], grads: Any, inputs: list[Tensor]) -> tuple[Tensor | None, ...]:
        if not any(out.requires_grad for out in outputs):
            return (None,) * len(inputs)
        with torch.enable_grad(), _unwrapped_errors():
            # torch takes a loss by itself, as it has no gradients beside it.
            ends = outputs[0] if self.is_last else tuple(outputs)
            made: tuple[Tensor | None, ...] = stage_backward()(ends, grads, inputs)
        return made

    def _arrived_grads(self, grads: Sequence[Tensor]) -> list[Tensor] | None:
        """Return copies of the gradients of outputs; None for a loss."""
        if self.is_last:
            return None
        return self._zeros(self.shape.outs) if self.has_signals else [grad.clone() for grad in grads]

    def _zeros(self, kinds: Sequence[TensorKind]) -> list[Tensor]:
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        return [torch.zeros(kind.shape, dtype=kind.dtype, device=device) for kind in kinds]

    def _parameters(self) -> Any:
        return (parameter for parameter in self.module.parameters() if parameter.requires_grad)

    def _hooks(self) -> Any:
        return nullcontext() if self.memory is None or not self.trains else self.memory.hooks()

    def _count(self) -> None:
        if self.memory is not None:
            self.memory.count()

    def _keep(self, tensors: Iterable[Tensor]) -> Any:
        return _NOTHING if self.memory is None else self.memory.keep(tensors)


@contextmanager
def _unwrapped_errors() -> Iterator[None]:
    """Raise the error that caused torch's in its place: `stage_backward` hides every one behind shapes."""
    try:
        yield
    except RuntimeError as error:
        if is_of_distributed(error) and error.__cause__ is not None:
            raise error.__cause__ from None
        raise


_NOTHING = SavedMemory().keep(())
"""Stands for kept tensors that nobody counts."""
