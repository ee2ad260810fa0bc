"""Damaged columns for the simulator core, a case per seed: `python core_fuzz.py FIRST COUNT FILE`.

Runs in a process of its own, so that a crash, a hang or a memory that runs out ends that process alone; the seed
that it was at then stands in FILE.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import resource
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from random_programs import random_machine, random_program

from meshweave.algorithms.matmul2d import DATAFLOWS, Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from meshweave.estimate.chains import skeleton_code, skeleton_ps
from meshweave.ir.analysis.native_proof import Verdict, proof_columns, prove
from meshweave.ir.program.parse import parse
from meshweave.ir.skeleton import Part, Phase, Skeleton
from meshweave.simulate.columns import Columns
from meshweave.simulate.engine import (
    Core,
    ProgramFault,
    _exchanges,
    _machine_columns,
    _Routes,
    _sized,
    _work_flops,
)
from meshweave_studies.gpu import Arbiter, lower
from meshweave_studies.gpu.run import columns_of, run_channel, run_gpus

sys.path.append(str(Path(__file__).parents[2] / "studies" / "tests"))
from gpu_programs import fused, sequential, small_gpu

Data = dict[Any, Any]

GOLDEN = Path(__file__).parent.parent / "golden"
ADDRESS_SPACE = 4 << 30
SECONDS = 60
"""For one case, instrumented code on a busy machine included; almost all take milliseconds."""
MAX_OPS = 5000
"""What a caller lets a program have bounds what the core may spend on it."""
MAX_GPU_STEPS = 200_000
NUM_PROGRAMS = 60

EXTREMES = (
    0,
    1,
    -1,
    2,
    7,
    63,
    64,
    2**16,
    2**20,
    2**31,
    2**32,
    2**40,
    2**48,
    2**60,
    2**62,
    2**63 - 1,
    -(2**63),
)


@cache
def base(number: int) -> tuple[Data, Data]:
    """Columns of a program and of a machine that it runs on."""
    draw = random.Random(number)
    while True:
        program = random_program(draw, 4)
        machine = random_machine(draw, program)
        if machine is not None:
            break
    columns = Columns(program)
    columns.data["max_ops"][0] = MAX_OPS
    on = _machine_columns(machine, columns.priced_axes, columns.rated_work)
    on["work_flops"] = on["sized"] = np.array([], dtype=np.int64)
    on["exchange_ps"] = _exchanges(machine, columns)
    with contextlib.suppress(ProgramFault):
        core = Core(columns.data)
        on["work_flops"] = _work_flops(machine, core, columns)
        on["sized"] = _sized(machine, core, columns)
        _Routes(machine).add(core.routes(on["num_directions"], on["rails"]), columns, on)
    return dict(columns.data), on


@cache
def proof_base(number: int) -> Data:
    """Columns of a golden program, or of a random one, for its proof."""
    draw = random.Random(number)
    programs = [parse(path.read_text()) for path in sorted(GOLDEN.glob("*.txt"))]
    program = draw.choice(programs) if draw.random() < 0.8 else random_program(draw, 4)
    columns = proof_columns(program, labels=True)
    columns["max_ops"] = np.array([MAX_OPS])
    return dict(columns)


@cache
def skeleton_base(number: int) -> Any:
    """Code of the skeleton of a SUMMA product, alone or as a part."""
    draw = random.Random(number)
    problem = Matmul2dProblem(
        *(draw.randint(8, 40) for _ in "mnk"), draw.choice([(2, 3), (4, 2), (1, 3)]), draw.choice(DATAFLOWS)
    )
    config = Matmul2dConfig((1,) * draw.randint(1, 6), packets=draw.choice([1, 3]))
    skeleton = PRODUCTS_2D["summa"].skeleton(problem, config)
    if draw.random() < 0.5:
        parts = (Part("0", skeleton), Part("1", skeleton, (("compute", ("0",)),)))
        skeleton = Skeleton((Phase(1, parts),))
    return skeleton_code(skeleton, lambda work: getattr(work, "part_bytes", 5) + 3)


@cache
def gpu_base(number: int) -> Data:
    """Columns of a few products and collectives on a small GPU, and of requests to its memory."""
    draw = random.Random(number)
    num_ranks = draw.choice([2, 3])
    program = draw.choice([sequential, fused])(32 * num_ranks, 32, draw.choice([16, 40]), num_ranks)
    gpu = small_gpu()
    arbiter = Arbiter(
        draw.choice(["round-robin", "compute-first", "communication-aware"]), draw.choice([0, 5])
    )
    arrivals = sorted(draw.randrange(300) for _ in range(draw.randint(0, 60)))
    requests = [
        (draw.randrange(2), arrival, draw.randrange(16), draw.randrange(4), 4, draw.randrange(3), tag)
        for tag, arrival in enumerate(arrivals)
    ]
    return {
        **columns_of(lower(program, gpu), gpu, 10**11, draw.choice([10**5, 10**6]), arbiter),
        "requests": np.array(requests, dtype=np.int64).reshape(-1),
    }


def gpu_case(draw: random.Random) -> str:
    """Damaged columns for GPUs in detail, or for one memory channel."""
    columns = damaged(draw, gpu_base(draw.randrange(NUM_PROGRAMS)))
    try:
        if draw.random() < 0.3:
            events = run_channel(columns)
            assert events.size == 6 * (columns["requests"].size // 7) and (events >= 0).all()
            return "runs"
        num_gpus = draw.choice([1, 1, 1, 1, 2, 2, 3, draw.choice([0, -1, 2**40])])
        out = run_gpus(columns, num_gpus, MAX_GPU_STEPS)
    except ValueError:
        return "refused"
    except ProgramFault:
        return "cannot run"
    assert (out["kernel_ends"] >= out["kernel_starts"]).all() and (out["traffic"] >= 0).all()
    return "runs"


def other_value(draw: random.Random, values: Any) -> Any:
    at, out = draw.randrange(values.size), values.copy()
    choices = [draw.choice(EXTREMES), draw.randint(-3, 9), int(values[at]) + draw.choice([-1, 1])]
    out[at] = min(max(draw.choice([*choices, int(draw.choice(values))]), -(2**63)), 2**63 - 1)
    return out


def other_form(draw: random.Random, values: Any) -> Any:
    """What is no column, or one of another length."""
    match draw.randrange(9):
        case 0:
            return values[: draw.randint(0, values.size)].copy()
        case 1:
            return np.append(values, draw.choice(EXTREMES[:12]))
        case 2:
            return values.astype(draw.choice(["i4", "u8", "f8", "?", ">i8", "O", "M8[s]"]))
        case 3:
            return np.repeat(values, 2)[::2]
        case 4:
            return values[::-1]
        case 5:
            return values.reshape(1, -1)
        case 6:
            return draw.choice(
                [None, 3, "text", b"bytes", values.tolist(), np.int64(3), np.array(3), object()]
            )
        case 7:
            return np.broadcast_to(np.int64(draw.choice(EXTREMES)), (3,))
    return values[:0]


def damaged(draw: random.Random, data: Data) -> Data:
    out = dict(data)
    for _ in range(draw.choice([1, 1, 2, 3, 8])):
        name = draw.choice(list(out))
        kind = draw.random()
        if kind < 0.03:
            del out[name]
        elif kind < 0.06:
            out[draw.choice(["more", 7, None, ""])] = out[name]
        elif kind < 0.15:
            if isinstance(out[name], np.ndarray) and out[name].dtype == np.int64 and out[name].ndim == 1:
                out[name] = other_form(draw, out[name])
        elif isinstance(out[name], np.ndarray) and out[name].dtype == np.int64 and out[name].ndim == 1:
            if name == "max_ops" or not out[name].size:
                continue
            out[name] = other_value(draw, out[name])
    return out


def case(seed: int) -> str:
    """What became of one case; whatever is raised besides what the core documents goes up."""
    draw = random.Random(seed)
    if draw.random() < 0.15:
        return gpu_case(draw)
    if draw.random() < 0.2:
        code = skeleton_base(draw.randrange(NUM_PROGRAMS))
        for _ in range(draw.choice([1, 1, 2, 3])):
            code = other_value(draw, code)
        try:
            skeleton_ps(code[: draw.randint(0, code.size)].copy() if draw.random() < 0.1 else code)
        except ValueError:
            return "refused"
        except ProgramFault:
            return "cannot run"
        return "timed"
    if draw.random() < 0.3:
        try:
            return Verdict(prove(damaged(draw, proof_base(draw.randrange(NUM_PROGRAMS))))).name.lower()
        except ValueError:
            return "refused"
    program, machine = base(draw.randrange(NUM_PROGRAMS))
    try:
        if draw.random() < 0.8:
            core = Core(damaged(draw, program))
            num_links = draw.randint(1, 9)
            machine = dict(machine, link_rates=np.array(draw.choices([1, 10**9, 2**60], k=num_links)))
            count = core.routes(machine["num_directions"], machine["rails"]).size // 3
            links = [
                [4 * draw.randrange(num_links) + draw.randint(1, 3) for _ in range(draw.randint(0, 3))]
                for _ in range(count)
            ]
            machine["route_starts"] = np.cumsum([0, *map(len, links)], dtype=np.int64)
            machine["route_links"] = np.array([link for route in links for link in route], dtype=np.int64)
            machine["one_sided"] = np.array([draw.randint(1, 9) for _ in range(8 * count)], dtype=np.int64)
        else:
            core = Core(program)
        if draw.random() < 0.3:
            machine = damaged(draw, machine)
        core.edges(draw.randint(-1, 3)) if draw.random() < 0.1 else None
        assert core.rows().size == core.num_ops == core.starts()[-1]
        outputs = core.run(machine)
    except ValueError:
        return "refused"
    except ProgramFault:
        return "cannot run"
    assert (outputs["issued_ps"] >= 0).all() and (outputs["ended_ps"] >= outputs["issued_ps"]).all()
    assert outputs["ended_ps"].size == core.num_ops
    return "runs"


def main(first: str, count: str, file: str) -> None:
    if "libasan" not in Path("/proc/self/maps").read_text():  # which reserves terabytes of addresses
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    faulthandler.enable()
    at = os.open(file, os.O_WRONLY | os.O_CREAT)
    seen: dict[str, int] = {}
    for seed in range(int(first), int(first) + int(count)):
        os.pwrite(at, f"{seed:20d}".encode(), 0)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        what = case(seed)
        seen[what] = seen.get(what, 0) + 1
    faulthandler.cancel_dump_traceback_later()
    print(*(f"{number} {what}" for what, number in sorted(seen.items())), sep=", ")


if __name__ == "__main__":
    main(*sys.argv[1:])
