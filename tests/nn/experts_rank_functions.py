"""What the ranks of test_expert_exchange.py run."""

import time
from dataclasses import replace

import numpy as np
import torch

from meshweave.algorithms.experts import ExpertsProblem, Routing
from meshweave.algorithms.experts.reference import layer_reference
from meshweave.algorithms.table import algorithm
from meshweave.describe.layout.mesh import Mesh
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.counted import CountedProgram
from meshweave.lower import lower_one_sided
from meshweave.nn import ExpertExchange, grouped_product

ROUTINGS = {
    "uneven": Routing("power", 3, 1.5),
    "balanced": Routing("balanced", 1),
    "one": Routing("table", 1, table=(0.0, 1.0) + (0.0,) * 6),
}


def problem_of(payload, num_ranks):
    routing = ROUTINGS[payload["routing"]]
    shape = tuple(payload.get("mesh", (num_ranks,)))
    mesh = Mesh.of("ep", shape, ("host", "local")[2 - len(shape) :])
    hidden, inner = payload.get("sizes", (6, 5))
    return ExpertsProblem(
        mesh,
        9,
        1 if payload["routing"] == "one" else 2,
        8,
        hidden,
        inner,
        payload.get("dtype", "float64"),
        "training",
        routing=routing,
        capacity=payload.get("capacity"),
    )


def random_tensors(problem, seed):
    """Inputs of a layer in real numbers, as one process has them."""
    draw = np.random.default_rng(seed)
    rows = problem.num_ranks * problem.tokens
    shapes = {
        "X": (rows, problem.hidden),
        "Gates": (rows, problem.top_k),
        "W1": (problem.num_experts, problem.hidden, 2 * problem.inner),
        "W2": (problem.num_experts, problem.inner, problem.hidden),
        "dY": (rows, problem.hidden),
    }
    return {name: draw.standard_normal(shape) for name, shape in shapes.items()} | {
        "Choices": problem.choices
    }


def part_of(value, context):
    size = value.shape[0] // context.num_ranks
    part = value[context.rank * size : (context.rank + 1) * size]
    return torch.from_numpy(np.ascontiguousarray(part))


def difference(made, expected, context):
    expected = part_of(expected, context)
    return float((made.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def layer_by_exchange(context, payload):
    """Train one layer through dispatch and combine; return the largest differences from a loop over experts."""
    problem = problem_of(payload, context.num_ranks)
    whole = random_tensors(problem, payload.get("seed", 0))
    expected = layer_reference(problem, whole)
    torch_context = TorchContext(liveness=context.liveness)
    own = {name: part_of(value, context) for name, value in whole.items()}
    dtype = getattr(torch, problem.dtype)
    own = {name: value if name == "Choices" else value.to(dtype) for name, value in own.items()}
    x, gates, w1, w2 = (own[name].requires_grad_() for name in ("X", "Gates", "W1", "W2"))
    exchange = ExpertExchange(
        range(context.num_ranks), problem.num_experts, entry=payload["entry"], capacity=problem.capacity,
        context=torch_context,
    )  # fmt: skip
    rows, handle = exchange.dispatch(x, own["Choices"])
    h = grouped_product(rows, w1, handle.rows_per_expert)
    a = torch.nn.functional.silu(h[:, : problem.inner]) * h[:, problem.inner :]
    y = exchange.combine(grouped_product(a, w2, handle.rows_per_expert), handle, gates)
    y.backward(own["dY"])
    made = {"Y": y.detach(), "dX": x.grad, "dGates": gates.grad, "dW1": w1.grad, "dW2": w2.grad}
    return {
        "differences": {name: difference(value, expected[name], context) for name, value in made.items()},
        "rows": sum(handle.rows_per_expert),
    }


def layer_by_program(context, payload):
    """Run forward and backward as one program, at several routings in turn; return differences and seconds."""
    problem = problem_of(payload, context.num_ranks)
    torch_context = TorchContext(liveness=context.liveness)
    entry = algorithm(payload["entry"])
    config = list(entry.candidates(problem))[payload.get("candidate", 0)]
    program = CountedProgram(
        entry.counted_program(problem, config), context.rank, context=torch_context,
        calls=entry.functions(problem), lowered=lower_one_sided if entry.is_one_sided else None,
    )  # fmt: skip
    worst, seconds = {}, []
    for seed, routing in enumerate(payload.get("turns", [payload["routing"]])):
        turn = replace(problem, routing=ROUTINGS[routing])
        whole = random_tensors(turn, seed)
        expected = layer_reference(turn, whole)
        own = {name.lower(): part_of(value, context) for name, value in whole.items()}
        values = entry.counts(turn, config)
        began = time.perf_counter()
        bound = program.run(own, {name: values[name] for name in program.program.counts_of})
        seconds.append(time.perf_counter() - began)
        for name, value in expected.items():
            off = difference(bound.outputs[name.lower()], value, context)
            worst[name] = max(worst.get(name, 0.0), off)
    return {"differences": worst, "seconds": seconds}
