"""What the ranks of test_blocks.py run."""

import numpy as np
import torch

from meshweave.algorithms.block import BlockConfig, BlockProblem
from meshweave.algorithms.table import algorithm
from meshweave.execute.numpy import local_inputs
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.context import TorchContext


def relative_errors(context, payload):
    """Runs blocks; returns for each the largest error of this rank's outputs, relative to the largest element."""
    torch.set_num_threads(1)
    shared = TorchContext(liveness=context.liveness, deadline_s=30.0)
    errors = []
    for name, fields, chunks in payload["blocks"]:
        problem = BlockProblem(**{**fields, "mesh_shape": tuple(fields["mesh_shape"])})
        entry = algorithm(name)
        program = entry.program(problem, BlockConfig(chunks))
        inputs = entry.random_inputs(problem)
        expected = entry.reference(problem, inputs)
        given = {
            key: torch.from_numpy(value).to(getattr(torch, program.buffer_of[key].dtype))
            for key, value in local_inputs(program, inputs, context.rank).items()
        }
        bound = bind(program, context.rank, given, context=shared, calls=entry.functions(problem))
        bound.run()
        worst = 0.0
        for buffer in program.buffers:
            if buffer.kind == "output":
                whole = expected[buffer.tensor]
                shard = whole[np.ix_(*buffer.layout.indices(whole.shape, context.rank))]
                error = np.abs(bound.outputs[buffer.name].double().numpy() - shard).max(initial=0.0)
                worst = max(worst, float(error / np.abs(whole).max()))
        errors.append(worst)
    shared.close()
    return errors
