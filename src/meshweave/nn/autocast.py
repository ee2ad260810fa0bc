"""Operands of a product as `torch.autocast` has them."""

from __future__ import annotations

from typing import Any

import torch


def autocast_operands(device_type: str, *operands: Any) -> tuple[Any, ...]:
    """Return the operands of a product cast as `torch.autocast` does, differentiably, in the order given.

    Where autocast is enabled for `device_type` ("cuda", "cpu"), an operand of a floating dtype other than float64
    is cast to autocast's dtype. Every other operand, and None, is returned as it is.
    """
    if not torch.is_autocast_enabled(device_type):
        return operands
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        operand.to(dtype)
        if operand is not None and operand.is_floating_point() and operand.dtype != torch.float64
        else operand
        for operand in operands
    )
