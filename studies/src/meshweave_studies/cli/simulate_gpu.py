"""`meshweave simulate-gpu`: a program on a GPU in detail; kernels, memory traffic, and who waited for whom."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from meshweave.base.errors import ProgramError, UnsupportedError, printable
from meshweave.base.outputs import write_file
from meshweave.base.units import format_bytes, format_s, to_s
from meshweave.cli.option_fields import option, with_options
from meshweave.cli.options import JSON_HELP, output, print_json, say_written
from meshweave.cli.simulate import MachineOptions, read_program_case
from meshweave.describe.machine.gpu import ARBITRATIONS
from meshweave.report.tables import text_console, text_table
from meshweave.report.timeline import write_chrome
from meshweave_studies.gpu import Arbiter
from meshweave_studies.gpu.case import GpuCase, simulate_gpu_case

MOST_THRESHOLD = 1 << 20
"""Entries that a threshold has at most: more than any queue."""


class ArbitrationPolicy(StrEnum):
    """How memory controllers choose between computing and communication."""

    round_robin = "round-robin"
    compute_first = "compute-first"
    communication_aware = "communication-aware"


@dataclass(frozen=True)
class GpuOptions:
    """How the memory arbitrates, and what is written."""

    arbitration: ArbitrationPolicy | None = option(
        None,
        "How memory controllers choose between computing and communication; "
        "communication-aware is T3's MCA. Default: round-robin.",
    )
    threshold: str = option(
        "auto",
        "Of communication-aware: communication is issued while a queue has fewer entries; 'auto' takes "
        "5, 10, 30 or none by how full the queues are while the first work groups run alone.",
    )
    starvation: int | None = option(
        None,
        "Of communication-aware: cycles of the memory after which communication goes first. Default: "
        "the GPU's.",
        min=1,
        max=1 << 20,
    )
    trace: Path | None = output("Write a Chrome / Perfetto trace with memory as counter tracks.")
    report: Path | None = output("Write a page here: kernels, and memory over time; self-contained HTML.")
    json: bool = option(False, JSON_HELP)


@with_options
def simulate_gpu(
    what: Annotated[str, typer.Argument(help="A program text file, '-' for one on stdin, or an algorithm.")],
    machine: MachineOptions,
    options: GpuOptions,
) -> None:
    """Simulate a program on a cluster whose chip has a GPU in detail, down to caches and memory controllers.

    One GPU stands for all of a ring. Shown are its kernels, what its memory read and wrote, and who waited for
    whom; page and trace have these over time.

    Example: meshweave simulate-gpu program.txt --cluster t3-8 --report memory.html

    More:    meshweave simulate-gpu t3_ring --cluster t3-8 --arbitration communication-aware --starvation 2000
    """
    arbiter = read_arbiter(options.arbitration, options.threshold, options.starvation)
    case = read_program_case(what, machine)
    try:
        simulated = simulate_gpu_case(case, arbiter)
    except ProgramError as error:
        raise ProgramError(f"{printable(what)}: {error}") from None
    if options.trace is not None:
        write_chrome(options.trace, [simulated.trace()])
    if options.report is not None:
        from meshweave_studies.gpu.memory_page import memory_page

        shown = (_lead(simulated), simulated.trace(), _traffic(simulated), _waits(simulated))
        write_file(options.report, memory_page(case.title, case.subject, *shown))
    if options.json:
        print_json([simulated.to_json()])
        return
    _print(simulated)
    say_written(options.trace, options.report)


def read_arbiter(policy: str | None, threshold: str, starvation: int | None) -> Arbiter:
    """Return the arbiter that options describe.

    Raises:
        UnsupportedError: there is a threshold or a starvation limit without the policy that has them, or a
            threshold is no number of entries.
    """
    if policy != "communication-aware":
        if threshold != "auto" or starvation is not None:
            raise UnsupportedError("--threshold and --starvation are of --arbitration communication-aware")
        return Arbiter(next((name for name in ARBITRATIONS if name == policy), "round-robin"))
    entries = {"auto": 0, "none": MOST_THRESHOLD}.get(threshold)
    if entries is None:
        entries = int(threshold[:8]) if threshold.isdecimal() else 0
        if not 0 < entries <= MOST_THRESHOLD or len(threshold) > 8:
            raise UnsupportedError(
                f"--threshold '{printable(threshold)}' is no number of entries; give 1 to {MOST_THRESHOLD}, "
                "'auto' or 'none'"
            )
    return Arbiter("communication-aware", entries, starvation or 0)


def _traffic(simulated: GpuCase) -> dict[str, int]:
    """Return the bytes that memory read and wrote, by what for."""
    traffic = simulated.run.traffic_bytes
    return {source.name.lower().replace("_", " "): count for source, count in traffic.items() if count}


def _lead(simulated: GpuCase) -> str:
    return (
        f"{format_s(simulated.duration_s)}; memory moved {format_bytes(simulated.moved_bytes)}, "
        f"{100 * simulated.moved_share:.1f} % of what it could"
    )


def _waits(simulated: GpuCase) -> str:
    """Return sentences about the queues, and who waited for whom."""
    mean, most = simulated.queued
    communication, compute, withheld = (
        f"{100 * simulated.waited_share(name):.1f} %"
        for name in ("communication_behind_cycles", "compute_behind_cycles", "held_cycles")
    )
    limit = "" if simulated.threshold is None else f" below {simulated.threshold} entries"
    return (
        f"Memory controllers: {simulated.arbiter.policy}{limit}; {mean:.1f} of {simulated.gpu.memory.queue} "
        f"entries queued on average, {most:.1f} in the fullest microsecond. Communication waited behind computing "
        f"in {communication} of all cycles, computing behind communication in {compute}; the policy withheld "
        f"communication in {withheld}"
    )


def _print(simulated: GpuCase) -> None:
    case = simulated.case
    console = text_console()
    console.print(f"\n{case.title}", style="bold", markup=False)
    console.print(f"  {case.subject}, {simulated.gpu.name} in detail", markup=False)
    console.print(f"  duration {_lead(simulated)}", markup=False)
    console.print(f"  {_waits(simulated)}", markup=False)
    spans = simulated.run.spans
    kernels = [(name, format_s(to_s(start)), format_s(to_s(end - start))) for name, start, end in spans]
    console.print(text_table(("kernel", "from", "took"), kernels, ("kernel",), title="kernels"))
    traffic = [(name, format_bytes(count)) for name, count in _traffic(simulated).items()]
    console.print(text_table(("of", "bytes"), traffic, ("of",), title="memory traffic"))
