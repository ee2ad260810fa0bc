"""`meshweave reproduce`: published results of papers, computed again and judged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

import typer

from meshweave.cli.option_fields import option, with_options
from meshweave.cli.options import progress_bar
from meshweave.describe.machine.cluster import load_cluster
from meshweave_studies.cli.reproduce_all import every_paper
from meshweave_studies.cli.reproduce_measured import kernels, nccl, published
from meshweave_studies.cli.reproduce_options import Outputs

reproduce = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Compute the published results of papers again: tables with verdicts, and the papers' figures.",
)


class ProductTiming(StrEnum):
    """What gives the times of products: closed-form estimates, or simulation."""

    estimate = "estimate"
    simulate = "simulate"


@reproduce.callback()
def papers() -> None:
    """Compute the published results of papers again: tables with verdicts, and the papers' figures."""


reproduce.command("all")(every_paper)
for measured in (kernels, nccl, published):
    reproduce.command()(measured)


@dataclass(frozen=True)
class MeshSliceOptions:
    """How times are made, by which constants, and which figures are computed."""

    by: ProductTiming = option(
        ProductTiming.simulate,
        "Time products by closed-form estimates (seconds) or by simulation of every chip (minutes). "
        "Estimates choose meshes and slice counts in both cases, as the paper's autotuner does.",
    )
    reading: str = option(
        "public",
        "What the paper leaves open, by name: public, fitted-links, one-part or shared-links (the pod); "
        "public, fixed-batch or public-defaults (the real 4x4 mesh).",
    )
    cluster: str = option(
        "",
        "The pod whose constants are judged: a catalog cluster or a TOML file. By default "
        "that of the reading.",
    )
    figures: str | None = option(None, "Compute only these figures: some of 9 to 14, separated by commas.")


@reproduce.command()
@with_options
def meshslice(options: MeshSliceOptions, outputs: Outputs) -> None:
    """MeshSlice (ISCA '25): every number of its evaluation beside ours with a verdict, and figures 9 to 14.

    GPT-3 and Megatron-NLG run on 16 to 256 chips. MeshSlice is compared with Wang, Collective, SUMMA, Cannon, 1D
    tensor parallelism and FSDP, each at its own best mesh. A row holds within 3 points of a utilisation, a quarter
    of a gain, 3 % of other numbers; it is near up to 10 points, half of a gain or 10 %. What the paper leaves open
    is a reading with a name, and a table has one. Without --rows and --figures, all rows of the reading are
    computed, and with --out or --report all figures too.

    Example: meshweave reproduce meshslice --reading one-part --by estimate
    """
    from meshweave_studies.papers import EVERYTHING, MESHSLICE, reproduce_meshslice

    pod = load_cluster(options.cluster) if options.cluster else None
    selection = outputs.selection(MESHSLICE, options.reading, options.figures)
    if selection == EVERYTHING and outputs.out is None and outputs.report is None:
        selection = replace(selection, figures=None)
    outputs.write(
        reproduce_meshslice(
            pod, selection, reading=options.reading, by=options.by.value, progress_bar=progress_bar
        )
    )


@dataclass(frozen=True)
class SlicingOptions:
    """The machines of the figures, and what is drawn of them."""

    pvc: str = option("pvc-node", "The machine of figure 2: a catalog cluster or a TOML file.")
    h100: str = option("h100-node", "The machine of figure 3: a catalog cluster or a TOML file.")
    reading: str = option(
        "all-factors",
        "What the paper leaves open, by name: all-factors (replication), cut (every matrix stays cut) or "
        "shapes (products in whole waves of tiles).",
    )
    figures: str | None = option(None, "Compute only these figures: 2, 3 or both, separated by a comma.")
    every: bool = option(False, "Draw figures with all 28 partitionings instead of the paper's six.", "--all")


@reproduce.command()
@with_options
def slicing(options: SlicingOptions, outputs: Outputs) -> None:
    """Slicing Is All You Need: figures 2 and 3, and what its text says of them with a verdict.

    A, B and C of the universal product are cut into row blocks, column blocks and 2D blocks. Each partitioning is
    simulated at its best replication and data movement, beside DTensor and COSMA (about a minute). The text states
    relations; a row holds where ours is on the same side. Without --rows and --figures, all rows and both figures
    are computed.

    Example: meshweave reproduce slicing --report slicing.html
    """
    from meshweave_studies.papers import SLICING, reproduce_slicing

    machines = load_cluster(options.pvc), load_cluster(options.h100)
    selection = outputs.selection(SLICING, options.reading, options.figures)
    outputs.write(
        reproduce_slicing(
            *machines,
            selection,
            reading=options.reading,
            all_partitionings=options.every,
            progress_bar=progress_bar,
        )
    )


@dataclass(frozen=True)
class AlpaCommOptions:
    """The hosts, the reading, and which figures are computed."""

    cluster: str = option(
        "",
        "A cluster of hosts with four chips or more and one NIC: a catalog cluster or a TOML file. "
        "Five hosts are taken. By default that of the reading.",
    )
    reading: str = option(
        "bandwidth",
        "What the paper leaves open, by name: bandwidth, messages (launches and packing cost time), alpa "
        "(rivals by their public code) or alpa-messages.",
    )
    figures: str | None = option(None, "Compute only these figures: some of 5 to 9, separated by commas.")


@reproduce.command()
@with_options
def alpacomm(options: AlpaCommOptions, outputs: Outputs) -> None:
    """AlpaComm (MLSys '23): its resharding microbenchmarks, training runs and ablations, figures 5 to 9.

    One device sends to several, and the nine cases of table 2 are resharded, by send/recv, all-gather and
    broadcast, in the orders that the paper compares. GPT and a U-Transformer train in two pipeline stages
    under 1F1B and eager-1F1B, with transfers beside the stages and without. All are simulated at full size
    (half a minute). The text states relations; a row holds where ours is on the same side. Without --rows and
    --figures, all rows and figures are computed.

    Example: meshweave reproduce alpacomm --report alpacomm.html
    """
    from meshweave_studies.papers import ALPACOMM, reproduce_alpacomm

    hosts = load_cluster(options.cluster) if options.cluster else None
    selection = outputs.selection(ALPACOMM, options.reading, options.figures)
    outputs.write(reproduce_alpacomm(hosts, selection, reading=options.reading, progress_bar=progress_bar))


@dataclass(frozen=True)
class AtpOptions:
    """The reading, and which figures are computed."""

    reading: str = option(
        "rates",
        "What a layer takes besides its FLOPs, by name: rates (nothing; all rows), or, for simulated "
        "rows, framework, framework-overlap, framework-host or framework-four-bytes.",
    )
    figures: str | None = option(None, "Compute only these figures: some of 10 to 12, separated by commas.")


@reproduce.command()
@with_options
def atp(options: AtpOptions, outputs: Outputs) -> None:
    """ATP: equations 2 to 4, the meshes that it chooses, figures 10 to 12 and table 3, beside ours with a verdict.

    Layers of four GPT models run on the paper's interconnects, which the catalog has as atp-ic1 to atp-ic6 (half
    a minute). Readings that the paper leaves open have rows of their own. Without --rows and --figures, all rows
    and figures are computed.

    Example: meshweave reproduce atp --report atp.html
    """
    from meshweave_studies.papers import ATP, reproduce_atp

    selection = outputs.selection(ATP, options.reading, options.figures)
    outputs.write(reproduce_atp(selection, reading=options.reading, progress_bar=progress_bar))


@reproduce.command(name="zero-bubble")
@with_options
def zero_bubble(outputs: Outputs) -> None:
    """Zero Bubble: table 4, the gains of its schedules over 1F1B and their memory, beside ours with a verdict.

    Four GPT models run on 8 to 32 A100s under our 1F1B, interleaved 1F1B, ZB-1p and ZB-2p, simulated by three
    readings of the times of stages: FLOPs at one rate, kernels by shape, and the authors' profile (a minute).
    Without --rows, all rows are computed.

    Example: meshweave reproduce zero-bubble --rows zb_1p_profiled,memory_order
    """
    from meshweave_studies.papers import ZERO_BUBBLE, reproduce_zero_bubble

    outputs.write(reproduce_zero_bubble(outputs.selection(ZERO_BUBBLE), progress_bar=progress_bar))


@dataclass(frozen=True)
class T3Options:
    """The reading, and which figures are computed."""

    reading: str = option(
        "table-1",
        "What the paper leaves open, by name: table-1 (all rows); for the sub-layers of figure 16 also "
        "occupancy, link-75, link-90, occupancy-75, occupancy-plain-sets or rows.",
    )
    figures: str | None = option(
        None, "Compute only these figures: 4, 6, some of 14 to 20, separated by commas."
    )


@reproduce.command()
@with_options
def t3(options: T3Options, outputs: Outputs) -> None:
    """T3 (ASPLOS '24): a product overlapped with its reduce-scatter in hardware, figures 4, 6 and 14 to 20.

    Sliced sub-layers of five models and one of a trillion parameters run sequentially, under T3 and under
    T3-MCA on a GPU that is simulated down to its memory controllers, one standing for a ring of 8 to 64
    (minutes; two simulations at a time). A gain holds within a quarter of itself. Without --rows and --figures,
    all rows and figures are computed.

    Example: meshweave reproduce t3 --rows mca,traffic
    """
    from meshweave_studies.papers import T3, reproduce_t3

    selection = outputs.selection(T3, options.reading, options.figures)
    bar = partial(progress_bar, plain_lines=True)
    outputs.write(reproduce_t3(selection, reading=options.reading, progress_bar=bar))
