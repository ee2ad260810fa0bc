"""The equations of both ends of a model: an embedding before the layers, a norm, logits and a loss after them.

A part of the vocabulary is enough for each step: rows of other tokens are zeros and add up; the greatest logit,
the sum of exponentials and the logit of the target are reductions over the vocabulary (Shoeybi et al. 2019,
section 3).
IDS_IN and IDS_OUT are the tokens that rows of E and columns of W_v are of: 0, 1, 2, ...
"""

from __future__ import annotations

from collections.abc import Iterator

from meshweave.algorithms.block.halves import Half, token_sizes
from meshweave.algorithms.block.problem import BlockProblem
from meshweave.ir.program import Tensor
from meshweave.ir.program.meanings import Function, Meaning, PositionNames, Product, Same, TensorPart

TOKENS_IN, TARGETS, IDS_IN, IDS_OUT = "TOKENS", "TARGETS", "IDS_IN", "IDS_OUT"
TABLE, LOGITS, LOSS = "E", "LOGITS", "LOSS"
GREATEST, SUMS = "LOGITMAX", "LOGITSUMS"


def head_of(problem: BlockProblem, is_flat: bool) -> Half:
    """Return the last norm and the product with W_v as the first part of a half, and E as its second weight."""
    return Half(
        problem,
        False,
        0,
        "Z",
        "",
        "GN",
        "SN",
        "NN",
        "WV",
        LOGITS,
        "",
        TABLE,
        "",
        problem.vocabulary,
        1,
        1,
        is_flat,
    )


def end_tensors(problem: BlockProblem, is_flat: bool) -> Iterator[Tensor]:
    """Yield the tensors of both ends, also of one that the problem lacks."""
    p, tokens, real = problem, token_sizes(problem, is_flat), problem.statistics_dtype
    for name in (TOKENS_IN, TARGETS, GREATEST):
        yield Tensor(name, tokens, real)
    for name in (IDS_IN, IDS_OUT):
        yield Tensor(name, (p.vocabulary,), real)
    yield Tensor(SUMS, (*tokens, 2), real)
    yield Tensor(LOSS, (1,), real)
    sizes = {
        TABLE: (p.vocabulary, p.hidden),
        "GN": (p.norm_rows, p.hidden),
        "WV": (p.hidden, p.vocabulary),
        "NN": (*tokens, p.hidden),
        LOGITS: (*tokens, p.vocabulary),
    }
    for name, shape in sizes.items():
        yield Tensor(name, shape, p.dtype)
        yield Tensor(f"D{name}", shape, p.dtype)
    for name in ("SN", "DSN"):
        yield Tensor(name, (*tokens, p.norm_rows), real)
    yield Tensor("DIN", (*tokens, p.hidden), p.dtype)


def end_meanings(problem: BlockProblem, is_flat: bool, two_steps: bool) -> Iterator[Meaning]:
    """Yield the equations of the ends that there are, forward."""
    head = head_of(problem, is_flat)
    names = head.token_names
    if problem.has_embedding:
        embedded = _embedded(names)
        yield Function(TensorPart("X", (*names, "j")), "embed", embedded, reduce="sum")
    if not problem.has_loss:
        return
    yield from head.norm_meanings(two_steps)
    yield Product(LOGITS, "NN", "WV")
    logits, greatest, sums, targets = _of_loss(names)
    loss = TensorPart(LOSS, (None,))
    yield Function(greatest, "row_max", (logits,), reduce="max")
    yield Function(sums, "softmax_sums", (logits, greatest, *targets), reduce="sum")
    yield Function(loss, "loss", (sums, greatest, loss), reduce="sum")


def end_gradient_meanings(problem: BlockProblem, is_flat: bool, two_steps: bool) -> Iterator[Meaning]:
    """Yield the equations of the ends that there are, backward."""
    head = head_of(problem, is_flat)
    names = head.token_names
    if problem.has_loss:
        logits, greatest, sums, targets = _of_loss(names)
        yield Function(
            TensorPart(f"D{LOGITS}", (*names, "v")), "loss_grad", (logits, greatest, sums, *targets)
        )
        yield Product("DNN", f"D{LOGITS}", "WV", transpose_b=True)
        yield Product("DWV", "NN", f"D{LOGITS}", transpose_a=True)
        yield from head.norm_gradient_meanings(two_steps)
        yield Same("DZ", "DIN")
    if problem.has_embedding:
        of_table = TensorPart(f"D{TABLE}", ("v", "j"))
        tokens, ids, _ = _embedded(names)
        ins = tokens, ids, TensorPart("DX", (*names, "j")), of_table
        yield Function(of_table, "embed_grad", ins, reduce="sum")


def _embedded(names: PositionNames) -> tuple[TensorPart, TensorPart, TensorPart]:
    """Return what the embedding reads: tokens, the tokens that rows of the table are of, and the table."""
    return (
        TensorPart(TOKENS_IN, names),
        TensorPart(IDS_IN, ("v",)),
        TensorPart(TABLE, ("v", "j")),
    )


def _of_loss(
    names: PositionNames,
) -> tuple[TensorPart, TensorPart, TensorPart, tuple[TensorPart, TensorPart]]:
    """Return logits, the greatest of a row, its sums, and targets with the tokens that columns are of."""
    return (
        TensorPart(LOGITS, (*names, "v")),
        TensorPart(GREATEST, names),
        TensorPart(SUMS, (*names, None)),
        (TensorPart(TARGETS, names), TensorPart(IDS_OUT, ("v",))),
    )
