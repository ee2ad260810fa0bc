"""The equations of both ends of a model: an embedding before the layers, a norm, logits and a loss after them.

A part of the vocabulary is enough for each step: rows of other tokens are zeros and add up; the greatest logit,
the sum of exponentials and the logit of the target are reductions over the vocabulary (Shoeybi et al. 2019,
section 3).
IDS_IN and IDS_OUT are the token numbers of the rows of E and of the columns of W_v: 0, 1, 2, ...
"""

from __future__ import annotations

from collections.abc import Iterator

from meshweave.algorithms.block.folds import layer_gradient_meanings, layer_meanings, layer_tensors
from meshweave.algorithms.block.place import head_of, token_sizes
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.algorithms.block.roles import Roles
from meshweave.ir.program import Tensor
from meshweave.ir.program.meanings import Function, Meaning, TensorPart

TOKENS_IN, TARGETS, IDS_IN, IDS_OUT = "TOKENS", "TARGETS", "IDS_IN", "IDS_OUT"
TABLE, LOGITS, LOSS = "E", "LOGITS", "LOSS"
GREATEST, SUMS = "LOGITMAX", "LOGITSUMS"


def end_tensors(problem: BlockProblem, roles: Roles) -> Iterator[Tensor]:
    """Yield the tensors of embedding, last norm, logits and loss, and their gradients, in global shapes.

    A tensor may be yielded more than once.
    """
    p, tokens, real = problem, token_sizes(problem, roles.is_flat), problem.statistics_dtype
    for name in (TOKENS_IN, TARGETS, GREATEST):
        yield Tensor(name, tokens, real)
    for name in (IDS_IN, IDS_OUT):
        yield Tensor(name, (p.vocabulary,), real)
    yield Tensor(SUMS, (*tokens, 2), real)
    yield Tensor(LOSS, (1,), real)
    sizes = {
        TABLE: (p.vocabulary, p.hidden),
        LOGITS: (*tokens, p.vocabulary),
    }
    for name, shape in sizes.items():
        yield Tensor(name, shape, p.dtype)
        yield Tensor(f"D{name}", shape, p.dtype)
    yield from layer_tensors(head_of(problem, roles.is_flat), roles)


def end_meanings(problem: BlockProblem, roles: Roles) -> Iterator[Meaning]:
    """Yield the equations of embedding, last norm, logits and loss, and for training of their gradients."""
    head = head_of(problem, roles.is_flat)
    names = head.token_names
    tokens, targets = TensorPart(TOKENS_IN, names), TensorPart(TARGETS, names)
    ids_in, ids_out = TensorPart(IDS_IN, ("v",)), TensorPart(IDS_OUT, ("v",))
    embedded = tokens, ids_in, TensorPart(TABLE, ("v", "j"))
    yield Function(TensorPart("X", (*names, "j")), "embed", embedded, reduce="sum")
    yield from layer_meanings(head, roles)
    logits, greatest = TensorPart(LOGITS, (*names, "v")), TensorPart(GREATEST, names)
    sums, loss = TensorPart(SUMS, (*names, None)), TensorPart(LOSS, (None,))
    yield Function(greatest, "row_max", (logits,), reduce="max")
    yield Function(sums, "softmax_sums", (logits, greatest, targets, ids_out), reduce="sum")
    yield Function(loss, "loss", (sums, greatest, loss), reduce="sum")
    if not problem.training:
        return
    of_logits = TensorPart(f"D{LOGITS}", (*names, "v"))
    yield Function(of_logits, "loss_grad", (logits, greatest, sums, targets, ids_out))
    yield from layer_gradient_meanings(head, roles)
    of_table = TensorPart(f"D{TABLE}", ("v", "j"))
    ins = tokens, ids_in, TensorPart("DX", (*names, "j")), of_table
    yield Function(of_table, "embed_grad", ins, reduce="sum")
