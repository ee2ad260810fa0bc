"""Parameters whose gradient a backward in two parts misses.

torch looks for parameters where their graph meets that of inputs, so it misses those whose results depend on no
input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from meshweave.base.errors import UnsupportedError


def reached_parameters(module: nn.Module, outputs: Sequence[Tensor]) -> dict[Any, str]:
    """Return {`AccumulateGrad` node: name} of the trained parameters that the graph of `outputs` leads to."""
    named = {
        get_gradient_edge(parameter).node: name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    left = [out.grad_fn for out in outputs]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
    return {node: name for node, name in named.items() if node in seen}


def require_all(reached: Mapping[Any, str], groups: Sequence[Mapping[str, Any]], number: int) -> None:
    """Raise UnsupportedError where a backward pass in two parts would miss the gradient of a parameter.

    Args:
        reached: the parameters that need a gradient, as `reached_parameters` returned them.
        groups: what torch's `stage_backward_input` returned: the groups of parameters whose gradients come later.
        number: that of the stage, for the error.
    """
    known = {node for group in groups for node in group["params"]}
    for node, name in reached.items():
        if node not in known:
            raise missed_gradient(name, number)


def missed_gradient(name: str, number: int) -> UnsupportedError:
    """Return, without raising it, the error for parameter `name` of stage `number` whose gradient would be
    missed.
    """
    return UnsupportedError(
        f"stage {number}: a backward in two parts misses the gradient of {name}, since what is computed from it "
        "depends on no input of the stage; take a schedule with whole backwards"
    )
