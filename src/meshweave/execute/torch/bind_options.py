"""What `bind` is asked for, and the checks of it that need no tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from meshweave.base.errors import BindError, ProgramError, UnsupportedError
from meshweave.execute.memory.base import RemoteMemory
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.analysis.dataflow import analyse, untimed_order
from meshweave.ir.program import Lane, Program

Mode = Literal["threads", "linear"]
UpdateOrder = Literal["fixed", "arrival"]
Products = Literal["library", "tracked"]


def check_update_order(update_order: UpdateOrder) -> None:
    """Raise BindError where `update_order` is neither "fixed" nor "arrival"."""
    if update_order not in get_args(UpdateOrder):
        raise BindError(f"update_order is {update_order!r}; it must be 'fixed' or 'arrival'")


def checked_products(products: Products, memory: RemoteMemory | None) -> bool:
    """Return whether `products` is "tracked": whether kernels of released matmuls count their tiles.

    Raises BindError for an unknown word, or "tracked" without `memory`; UnsupportedError for "tracked" where
    Triton is not installed.
    """
    if products not in get_args(Products):
        raise BindError(f"products is {products!r}; it must be 'library' or 'tracked'")
    if products == "tracked" and memory is None:
        raise BindError("tracked products are those of a program with `memory`: give one")
    if products == "tracked" and importlib.util.find_spec("triton") is None:
        raise UnsupportedError(
            "tracked products are kernels of Triton, which is not installed: pip install triton"
        )
    return products == "tracked"


def checked_mode(
    program: Program, rank: int, context: TorchContext, mode: Mode | None, order: Sequence[int] | None
) -> Mode:
    """Return the mode to bind for: `mode`, or where it is None "linear" for a context on CUDA, else "threads".

    Raises BindError where the program has no such rank, this process is another rank, `mode` is "threads" for a
    device other than a CPU, or `order` is given for another mode than "linear"; UnsupportedError after a failed
    run in the context; RankLostError where ranks are known to be lost.
    """
    context.lane_threads.check()
    if rank not in program.ranks:
        raise BindError(f"program {program.name} has no rank {rank}")
    if context.rank not in (None, rank):
        raise BindError(f"cannot bind rank {rank} in the process of rank {context.rank}")
    mode = mode or ("linear" if context.device.type == "cuda" else "threads")
    if mode == "threads" and context.device.type != "cpu":
        raise BindError(f"mode 'threads' is for tensors on a CPU, not on {context.device}: take 'linear'")
    if order is not None and mode != "linear":
        raise BindError("an order is for mode 'linear'")
    return mode


def check_serial(program: Program) -> None:
    """Raise BindError for a program that deadlocks where each lane runs one op at a time, in program order.

    `bind` runs lanes that way, whatever width or order they declare.
    """
    serial = tuple(Lane(lane.name) for lane in program.lanes)
    if serial == program.lanes:
        return
    try:
        untimed_order(analyse(replace(program, lanes=serial)))
    except ProgramError as error:
        raise BindError(
            f"lanes run one op at a time here, in program order; that ends in a {error}"
        ) from None
