"""Started under mpiexec by test_remote_memory.py: programs, updates, a refusal. Says "right", or what is wrong."""

from dataclasses import dataclass
from typing import Any

from memory_rank_functions import LOST, compare, stress
from mpi4py import MPI

from meshweave.base.errors import BindError
from meshweave.execute.memory import open_memory
from meshweave.execute.torch.bind import bind
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program.parse import parse


@dataclass
class Context:
    """What `launch` would give: here nobody listens for heartbeats."""

    rank: int
    num_ranks: int
    liveness: Any = None


def differ(context):
    memory = open_memory("auto", TorchContext(deadline_s=30.0))
    text = LOST.replace("8, 4", "12, 4") if context.rank == 1 else LOST
    try:
        bind(parse(text), context.rank, {}, context=memory.context, memory=memory)
    except BindError as error:
        return str(error).startswith("ranks are about to run different programs: ranks 0, 2 and 3 'lost' (")


def main():
    context, wrong = Context(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()), []
    names = ["universal_b", "universal_c", "t3_ring", "views", "operands"]
    wrong += compare(context, {"kind": "mpi", "programs": names})["wrong"]
    found = stress(context, {"kind": "mpi", "threads": 2, "turns": 20})
    mine = [added[context.rank] for added in MPI.COMM_WORLD.allgather(found["added"])]
    expected = [[sum(values) for values in zip(*rows, strict=True)] for rows in zip(*mine, strict=True)]
    wrong += found["errors"] if found["total"] == expected else ["stress"]
    if not differ(context):
        wrong.append("differ")
    everyone = MPI.COMM_WORLD.gather(wrong)
    if context.rank == 0:
        print("right" if everyone == [[]] * context.num_ranks else everyone, flush=True)


if __name__ == "__main__":
    main()
