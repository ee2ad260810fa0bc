"""`meshweave catalog`: models, clusters, kernels and GPUs in detail of the package, and their sources."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshweave.base.errors import DescriptionError, did_you_mean, printable
from meshweave.base.units import format_bytes, format_s
from meshweave.cli.options import JSON_HELP, print_json
from meshweave.describe.catalog import catalog_text, clusters, gpu_names, kernel_constants_names, models
from meshweave.describe.like import table_like
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.gpu import GpuFile, load_gpu
from meshweave.describe.machine.kernels import ChipKernels
from meshweave.describe.machine.kernels_file import load_kernels
from meshweave.describe.model import Transformer, load_model
from meshweave.describe.model.memory import ADAM_BYTES, RECOMPUTES, layers_activation_bytes, step_flops
from meshweave.describe.model.workload import Workload
from meshweave.report.tables import text_table

if TYPE_CHECKING:
    from rich.console import Console

KINDS = ("models", "clusters", "kernels", "gpus")
ONE_SEQUENCE = Workload(1, 2048)

_RECOMPUTED = {"none": "", "selective": "_selective_recomputation", "full": "_full_recomputation"}


def catalog(
    kind: Annotated[
        str | None, typer.Argument(help="models, clusters, kernels or gpus. Default: all.")
    ] = None,
    name: Annotated[
        str | None, typer.Argument(help="An entry: all of its numbers and their sources.")
    ] = None,
    toml: Annotated[
        bool, typer.Option("--toml", help="Print the file of the entry NAME, to start one of your own from.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """List models, clusters, constants of kernels, and GPUs described down to their memory, with key figures.

    With a NAME, print all numbers of that entry and their sources; its kind may be left out.

    Memory and FLOPs of a model follow from its sizes: mixed-precision training with Adam, one sequence of
    2048 tokens.

    Example: meshweave catalog models gpt3
    """
    if name is None and kind is not None and kind not in KINDS:  # a name alone will do
        kind, name = next(((k, kind) for k in KINDS if kind in _names(k)), (kind, None))
    if kind is not None and kind not in KINDS:
        known = KINDS if name is not None else (*KINDS, *(entry for k in KINDS for entry in _names(k)))
        what = "kind " if name is not None else ""
        raise DescriptionError(
            f"the catalog has no {what}'{printable(kind)}'{did_you_mean(kind, known)}; it has {', '.join(KINDS)}"
        )
    kinds = KINDS if kind is None else (kind,)
    if toml:
        if name is None or json:
            raise DescriptionError("--toml prints one entry; give its name, and not --json")
        typer.echo(catalog_text(kinds[0], name), nl=False)
        return
    if name is not None:
        data = _entry(kinds[0], name)
        if json:
            print_json(data)
        else:
            _print_entry(data)
        return
    if json:
        print_json({k: [_entry(k, entry) for entry in _names(k)] for k in kinds})
        return
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 120)
    printers = dict(zip(KINDS, (_print_models, _print_clusters, _print_kernels, _print_gpus), strict=True))
    for k in kinds:
        printers[k](console)
    console.print("one entry with its sources: meshweave catalog NAME", highlight=False)


def _names(kind: str) -> tuple[str, ...]:
    return dict(zip(KINDS, (models, clusters, kernel_constants_names, gpu_names), strict=True))[kind]()


def _entry(kind: str, name: str) -> dict[str, Any]:
    """Return an entry, laid over those that it is like, under "file", and what follows from it under "derived"."""
    data = table_like(kind, tomllib.loads(catalog_text(kind, name)), f"{name}.toml")
    if kind == "models":
        derived = _model_figures(load_model(name))
    elif kind == "kernels":
        derived = _kernels_figures(load_kernels(name))
    elif kind == "gpus":
        derived = _gpu_figures(load_gpu(name))
    else:
        derived = _cluster_figures(load_cluster(name))
    return {"name": name, "derived": derived, "file": data}


def _kernels_figures(kernels: ChipKernels) -> dict[str, Any]:
    return {
        "device": kernels.name,
        "products_flops_per_s": {dtype: constants.flops_per_s for dtype, constants in kernels.products},
        "attention_flops_per_s": {dtype: constants.flops_per_s for dtype, constants in kernels.attention},
        "collectives": [kind for kind, _ in kernels.collectives],
    }


def _gpu_figures(gpu: GpuFile) -> dict[str, Any]:
    return {
        "flops_per_s_of_a_unit": gpu.flops_per_s / gpu.compute_units,
        "memory_bytes_per_s": gpu.memory.bytes_per_s,
    }


def _model_figures(model: Transformer) -> dict[str, Any]:
    count = model.num_parameters
    layers = ", ".join(f"{x.name} {x.in_features} x {x.out_features}" for x in model.fc_layers())
    return {
        "num_parameters": count,
        "fc_layers": layers,
        "bfloat16_weight_bytes": 2 * count,
        "bfloat16_gradient_bytes": 2 * count,
        "adam_bytes": ADAM_BYTES[2] * count,
        "one sequence of 2048 tokens": {
            **{
                f"activation_bytes{_RECOMPUTED[kind]}": layers_activation_bytes(model, ONE_SEQUENCE, kind)
                for kind in RECOMPUTES
            },
            "step_flops": step_flops(model, ONE_SEQUENCE),
        },
    }


def _cluster_figures(cluster: Cluster) -> dict[str, Any]:
    shapes = ["x".join(map(str, shape)) for shape in cluster.network.mesh_shapes(2)]
    chip = cluster.chip
    return {
        "num_chips": cluster.num_chips,
        "peak_flops_per_s": {dtype: rate * cluster.num_chips for dtype, rate in chip.peak_flops_per_s},
        "memory_bytes": chip.memory_bytes * cluster.num_chips,
        "mesh_shapes": ", ".join(shapes),
    }


def _print_entry(data: dict[str, Any]) -> None:
    typer.echo(data["name"])
    _print_table(data["file"], 1)
    typer.echo("  derived:")
    _print_table(data["derived"], 2)


def _print_table(table: dict[str, Any], depth: int) -> None:
    """Print nested tables as indented lines, numbers with the unit that their key ends in."""
    pad = "  " * depth
    plain = {key: value for key, value in table.items() if not _is_nested(value)}
    width = max(map(len, plain), default=0)
    for key, value in plain.items():
        typer.echo(f"{pad}{key:<{width}}  {_format_number(key, value)}")
    for key, value in table.items():
        if isinstance(value, dict):
            typer.echo(f"{pad}{key}:")
            _print_table(value, depth + 1)
        elif _is_nested(value):
            for number, part in enumerate(value, 1):
                typer.echo(f"{pad}{key} {number}:")
                _print_table(part, depth + 1)


def _is_nested(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value))


def _format_number(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int | float):
        return str(value)
    if key.endswith("bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if key.endswith("flops_per_s") or key in ("bfloat16", "float16", "float32", "float64", "int8"):
        return f"{value / 1e12:g} TFLOP/s"
    if "bytes" in key:
        return f"{value} ({format_bytes(value)})"
    if key.endswith("_s"):
        return format_s(value) if value else "0 s"
    return f"{value:.4g}" if isinstance(value, float) or key.endswith("flops") else str(value)


def _print_models(console: Console) -> None:
    rows = []
    for name in models():
        model = load_model(name)
        attention = model.layer.attentions[0]
        heads = str(attention.heads)
        if attention.groups != attention.heads:
            heads += f" ({attention.groups} kv)"
        row = (
            name,
            f"{model.num_parameters / 1e9:.3g} B",
            str(model.num_layers),
            str(model.hidden),
            heads,
            f"{model.layer.counts['ffn']}{' gated' if model.gated_ffn else ''}",
            str(model.vocab_size or "not stated"),
        )
        rows.append(row)
    head = ("name", "parameters", "layers", "hidden", "heads", "FFN", "vocabulary")
    console.print(text_table(head, rows, ("name",), title="models"))


def _print_kernels(console: Console) -> None:
    rows = []
    for name in kernel_constants_names():
        kernels = load_kernels(name)
        lists = (", ".join(key for key, _ in of) for of in (kernels.products, kernels.attention))
        rows.append((name, *lists, ", ".join(kind for kind, _ in kernels.collectives)))
    head = ("name", "products", "attention", "collectives")
    console.print(text_table(head, rows, head, title="kernels"))


def _print_gpus(console: Console) -> None:
    rows = []
    for name in gpu_names():
        gpu = load_gpu(name)
        memory = f"{format_bytes(gpu.memory.bytes_per_s)}/s"
        peak, cache = f"{gpu.flops_per_s / 1e12:g} TFLOP/s", format_bytes(gpu.cache.num_bytes)
        rows.append((name, str(gpu.compute_units), peak, cache, memory))
    head = ("name", "compute units", "peak", "cache", "memory")
    console.print(text_table(head, rows, ("name",), title="GPUs in detail"))


def _print_clusters(console: Console) -> None:
    rows = []
    for name in clusters():
        cluster = load_cluster(name)
        chip, network = cluster.chip, cluster.network
        dtype, peak = max(chip.peak_flops_per_s, key=lambda pair: pair[1])
        axes = {axis.name: axis for axis in (network.axis(i, 2) for i in range(2))}
        row = (
            name,
            str(cluster.num_chips),
            chip.name,
            f"{peak / 1e12:g} TFLOP/s {dtype}",
            format_bytes(chip.memory_bytes),
            ", ".join(f"{a.name} {format_bytes(a.link_bytes_per_s)}/s" for a in axes.values()),
        )
        rows.append(row)
    head = ("name", "chips", "chip", "peak", "memory", "links")
    left = ("name", "chip", "links")
    console.print(text_table(head, rows, left, title="clusters", whole=("name",)))
