"""What ranks do in tests of proofs: say what is found of models with faults, and of right ones."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import faults
import more_faults
import torch
from torch.distributed.device_mesh import init_device_mesh

from meshweave.execute.ranks.job import RankContext
from meshweave.nn.prove.proof import prove


def said_of_faults(context: RankContext, payload: Mapping[str, Any]) -> dict[str, str]:
    """Return what is said of each fault, "" where it is not found; and what is left changed by a proof."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (context.num_ranks,), mesh_dim_names=("tp",))
    said = {}
    for fault in more_faults.chosen(payload["chosen"]):
        try:
            model, made, more = fault(mesh)
            proof = prove(model, made, more.pop("inputs", None), **more)
            said[fault.__name__] = "" if proof else str(proof)
        except Exception:
            said[fault.__name__] = traceback.format_exc()
    return said


def said_of_right_models(context: RankContext, payload: Mapping[str, Any]) -> dict[str, str]:
    """Return what is said of each right model, and what a proof leaves changed."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (context.num_ranks,), mesh_dim_names=("tp",))
    said = {}
    for name, (model, made, more) in faults.right_models(mesh, payload["thorough"]):
        try:
            before = _state(model, made)
            said[name] = str(prove(model, made, more.pop("inputs", None), **more))
            if before != _state(model, made):
                said[name] = f"changed: {said[name]}"
        except Exception:
            said[name] = traceback.format_exc()
    return said


def _state(model: Any, made: Any) -> list[Any]:
    """Return what a proof must not change: gradients, identities, training, dropout and random numbers."""
    module = made if isinstance(made, torch.nn.Module) else made.module
    state: list[Any] = [torch.get_rng_state().tolist()]
    for each in (model, module):
        state += [(name, id(p), p.grad is None, p.dtype) for name, p in each.named_parameters()]
        state += [(name, child.training, getattr(child, "p", None)) for name, child in each.named_modules()]
    return state
