"""Operands of a product as `torch.autocast` has them."""

from __future__ import annotations

from typing import Any

import torch


def autocast_operands(device_type: str, *operands: Any) -> tuple[Any, ...]:
    """Return the operands of a product cast as `torch.autocast` does, differentiably; None stays None.

    Where it is enabled for the device type, floating ones other than float64 get its dtype.
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
