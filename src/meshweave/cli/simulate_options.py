"""The options of `meshweave simulate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from meshweave.cli.entries import ConfigOption, SettingsOption
from meshweave.cli.options import JSON_HELP, OutputOption


class Lowering(StrEnum):
    """What collectives are lowered to before a simulation: nothing, rings of permutes, or chains of messages."""

    none = "none"
    rings = "rings"
    chains = "chains"


class Comparison(StrEnum):
    """What a simulation is compared with: the estimate in closed form, without contention."""

    estimate = "estimate"


ProgramArgument = Annotated[
    str,
    typer.Argument(
        help="A plan.json of `meshweave plan`, a program text file, '-' for one on stdin, or an algorithm."
    ),
]


@dataclass(frozen=True)
class MachineOptions:
    """The machine on which programs run, how it carries them, and which program of an algorithm is taken."""

    cluster: Annotated[
        str | None,
        typer.Option(
            help="A catalog cluster, a TOML file or words; ':N' sets the number of chips. Default: the plan's "
            "own, or as many chips as the program has ranks."
        ),
    ] = None
    logical: Annotated[
        bool,
        typer.Option(
            "--logical", help="Lay meshes on a torus that does not carry them, over links of several hops."
        ),
    ] = False
    lower: Annotated[
        Lowering,
        typer.Option(
            help="Write collectives out first: as rings of permutes, or broadcasts as chains of messages. The "
            "simulator runs them step by step either way."
        ),
    ] = Lowering.none
    settings: SettingsOption = field(default_factory=list)
    config: ConfigOption = 0
    limits: Annotated[
        bool,
        typer.Option("--limits/--no-limits", help="Of a program: refuse one that takes more than seconds."),
    ] = True


@dataclass(frozen=True)
class PlannedOptions:
    """Which products of a plan are simulated, or which step of its ranking, and which ranks are shown."""

    layer: Annotated[str, typer.Option(help="Of a plan: the layer (qkv, out, ff1, ff2).")] = "ff1"
    passes: Annotated[
        str, typer.Option("--pass", help="Of a plan: forward, backward_data, backward_weight or all.")
    ] = "all"
    algorithms: Annotated[
        str, typer.Option("--algorithm", help="Of a plan: algorithms separated by commas; 'best'; or 'all'.")
    ] = "best"
    mesh: Annotated[
        str | None,
        typer.Option(help="Of a plan: another mesh for all algorithms, ROWSxCOLS; slices are tuned for it."),
    ] = None
    place: Annotated[
        int, typer.Option(help="Of a plan of a step: the place of the configuration in its ranking.")
    ] = 1
    against: Annotated[
        Comparison | None, typer.Option(help="Show the closed form, which knows no contention, beside it.")
    ] = None
    fast: Annotated[
        bool,
        typer.Option(
            "--fast",
            help="On a cluster whose chip has a GPU in detail: take the rates of the cluster, as on other "
            "clusters.",
        ),
    ] = False
    ranks: Annotated[
        str,
        typer.Option(
            help="Ranks to tell about, separated by commas; pictures of several runs show the first. Default: the "
            "one in the middle of the mesh, the one that ends last, and 0."
        ),
    ] = ""


@dataclass(frozen=True)
class SimulateOutputs:
    """The files that a simulation writes, and whether it prints JSON."""

    trace: Annotated[Path | None, OutputOption(help="Write a Chrome / Perfetto trace of these ranks.")] = None
    svg: Annotated[Path | None, OutputOption(help="Write the timeline as a picture.")] = None
    png: Annotated[
        Path | None, OutputOption(help="Write the same picture as PNG (needs meshweave[png]).")
    ] = None
    report: Annotated[
        Path | None,
        OutputOption(help="Write a page here: timelines, parts, links, critical path; self-contained HTML."),
    ] = None
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False

    @property
    def paths(self) -> tuple[Path | None, ...]:
        """Return (trace, svg, png, report), None for each that is not to be written."""
        return self.trace, self.svg, self.png, self.report
