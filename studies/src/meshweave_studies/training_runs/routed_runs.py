"""Published runs of models with experts: which model, which degrees of experts, and how tokens travelled.

Readings, where rows do not say: each expert is on one rank (`expert_tensor` 1); optimizer states are sharded over
replicas (Megatron's distributed optimizer); tokens travel as a row says, else as the recipe of its source does
(`published/routed_recipes.toml`), else as DeepEP or on NVLink domains of more than eight chips as Hybrid-EP sends
them. Routing is even: benchmarks force it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshweave.algorithms.step import Parallelism
from meshweave.describe.files import parse_table
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.network import HostsNetwork
from meshweave.describe.model import load_model
from meshweave.describe.model.transformer import Transformer
from meshweave_studies.training_runs.rows import PublishedRun

EXCLUDED = (
    (r"nemotron[ _-]?[345]", "its layers are partly state-space layers"),
    (r"deepseek[ _-]?v4", "its attention is compressed"),
    (r"qwen3[ _.-]?(next|5)", "its layers are partly linear attention"),
    (r"\w-like", "its sizes follow no published config"),
    (r"grok", "its sizes are not verified"),
    (r"tokendrop", "tokens are dropped, and how many is not said"),
)
"""Patterns of a model's name, and why its rows are not predicted."""
_NOT_EVEN = re.compile(r"^(?!.*forc).*(dropless|not stated)", re.IGNORECASE)
_MODELS = (
    (r"deepseek[ _-]?v3", "deepseek-v3"),
    (r"kimi[ _-]?k2", "kimi-k2"),
    (r"qwen3[ _-]30b", "qwen3-30b-a3b"),
    (r"qwen3[ _-]235b", "qwen3-235b-a22b"),
    (r"gpt[ _-]?oss[ _-]120b", "gpt-oss-120b"),
    (r"gpt[ _-]?oss[ _-]20b", "gpt-oss-20b"),
    (r"mixtral[ _-]8x7b", "mixtral-8x7b"),
    (r"mixtral[ _-]8x22b", "mixtral-8x22b"),
)
"""Patterns of a model's name, and the entry of the catalog."""
_HOST_CHIPS = 8
_FILE = "routed_recipes.toml"


def exclusion(run: PublishedRun) -> str:
    """Return why a run of a model with experts is not predicted; "" where it is."""
    reason = next((why for pattern, why in EXCLUDED if re.search(pattern, run.model, re.IGNORECASE)), "")
    if not reason and _NOT_EVEN.search(run.others.get("balance", "")):
        reason = "how evenly its tokens were routed is not known"
    return reason


def routed_model(run: PublishedRun) -> Transformer | None:
    """Return the model of a run from the catalog, None where it has none of this name."""
    name = next((entry for pattern, entry in _MODELS if re.search(pattern, run.model, re.IGNORECASE)), None)
    return None if name is None else load_model(name)


def on_expert_ranks(run: PublishedRun, choice: Parallelism) -> Parallelism:
    """Return the parallelism of a run with its degrees of experts. Raises MeshweaveError."""
    expert, tensor = run.count("ep") or 1, run.count("etp") or 1
    return replace(choice, expert=expert, expert_tensor=tensor, zero=max(choice.zero, 1))


def expert_share(model: Transformer, sequence: int) -> float:
    """Return the share of the FLOPs of a layer's forward part that are products of experts."""
    layer = model.layer
    experts = sum(weight.active_size for weight in layer.parameters if weight.kind == "experts")
    others = sum(weight.size for weight in layer.parameters if weight.kind in ("matrix", "whole"))
    return experts / (experts + others + layer.attention_flops(sequence) / (2 * sequence))


@dataclass(frozen=True)
class RoutedRecipe:
    """How the software of a run was set, where its row does not say it (`published/routed_recipes.toml`).

    Attributes:
        dispatcher: a name of `cost.exchange`; "" where nobody says.
        captured: the share of a layer's kernels that the host issues at once.
        overlaps: whether exchanges of a micro-batch run beside what another computes.
        fuses_biases: whether one kernel multiplies for all experts and adds their biases.
    """

    dispatcher: str = ""
    captured: float = 0.0
    overlaps: bool = False
    fuses_biases: bool = False


@lru_cache(maxsize=1)
def _recipes() -> list[dict[str, Any]]:
    text = files("meshweave_studies").joinpath("published", _FILE).read_text("utf-8")
    listed: list[dict[str, Any]] = parse_table(text, _FILE, "toml")["recipe"]
    return listed


def recipe_of(run: PublishedRun) -> RoutedRecipe:
    """Return the recipe of a run with experts."""
    words = {"source": run.source, "model": run.model, "chips": run.chips, "config": run.config}
    for entry in _recipes():
        if all(re.search(entry.get(name, ""), text, re.IGNORECASE) for name, text in words.items()):
            return RoutedRecipe(**{name: value for name, value in entry.items() if name not in words})
    return RoutedRecipe()


def dispatcher_of(run: PublishedRun, cluster: Cluster) -> str:
    """Return the library by which tokens travelled, a name of `cost.exchange`."""
    said = run.others.get("dispatcher", "")
    for pattern, name in (
        (r"a2a|all-?to-?all", "all_to_all"),
        (r"hybridep", "hybridep"),
        (r"deepep", "deepep"),
    ):
        if re.search(pattern, said, re.IGNORECASE):
            return name
    network = cluster.network
    is_domain = isinstance(network, HostsNetwork) and network.chips_per_host > _HOST_CHIPS
    return recipe_of(run).dispatcher or ("hybridep" if is_domain else "deepep")
