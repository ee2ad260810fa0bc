"""What the ranks of test_pipelines.py run."""

import numpy as np
import torch
from mixed_problem import mixed_meshes, signal_functions

from meshweave.algorithms.pipeline import PipelineConfig
from meshweave.algorithms.pipeline.examples import chain_of_ranks
from meshweave.algorithms.table import algorithm
from meshweave.execute.numpy import local_inputs
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.context import TorchContext

PROBLEMS = {
    "chain": lambda: chain_of_ranks((0, 1, 2, 3), 5, 2),
    "u-shaped": lambda: chain_of_ranks((0, 1, 2, 3), 6, skips=((0, 3), (1, 3)), recomputes=(1, 2)),
    "interleaved": lambda: chain_of_ranks((0, 1, 2, 3, 0, 1, 2, 3), 6),
    "mixed meshes": lambda: mixed_meshes(4),
}


def run(context, payload):
    """Run pipelines; return for each the output buffers that are wrong, and the peak of this rank's stashes."""
    torch.set_num_threads(1)
    shared = TorchContext(liveness=context.liveness, deadline_s=30.0)
    results = []
    for case, name, transfers in payload["cases"]:
        problem, entry = PROBLEMS[case](), algorithm(name)
        program = entry.program(problem, PipelineConfig(transfers))
        if context.rank not in program.ranks:
            shared.prepare(program)
            results.append(([], None))
            continue
        inputs = entry.random_inputs(problem)
        expected = entry.reference(problem, inputs)
        given = {
            key: torch.from_numpy(np.ascontiguousarray(value))
            for key, value in local_inputs(program, inputs, context.rank).items()
        }
        functions = entry.functions(problem)
        if transfers == "signals":
            functions = signal_functions(problem, functions)
        bound = bind(program, context.rank, given, context=shared, calls=functions)
        for _ in range(2):
            bound.run()
        wrong = []
        for buffer in program.buffers:
            if (
                buffer.kind == "output"
                and context.rank in program.mesh_of[buffer.mesh]
                and transfers != "signals"
            ):
                whole = expected[buffer.tensor]
                shard = whole[np.ix_(*buffer.layout.indices(whole.shape, context.rank))]
                if not np.array_equal(bound.outputs[buffer.name].numpy(), shard):
                    wrong.append(buffer.name)
        results.append((wrong, bound.peak_stash_bytes))
    shared.close()
    return results
