"""Published runs of models with experts: which model, which degrees of experts, and how tokens travelled.

Readings, where rows do not say: each expert is on one rank (`expert_tensor` 1); optimizer states are sharded over
replicas (Megatron's distributed optimizer); tokens travel by all-to-all where a row says so, else as DeepEP sends
them, and on NVLink domains of more than eight chips as TRT-LLM's two-sided kernels do, for want of measured
exchanges of HybridEP. Routing is even: benchmarks force it.
"""

from __future__ import annotations

import re
from dataclasses import replace

from meshweave.algorithms.step import Parallelism
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
    tensor = int(run.others.get("etp") or 1)
    return replace(choice, expert=run.count("ep") or 1, expert_tensor=tensor, zero=max(choice.zero, 1))


def dispatcher_of(run: PublishedRun, cluster: Cluster) -> str:
    """Return the library by which tokens travelled, a name of `cost.exchange`."""
    said = run.others.get("dispatcher", "")
    if re.search(r"a2a|all-?to-?all", said, re.IGNORECASE):
        return "all_to_all"
    network = cluster.network
    is_domain = isinstance(network, HostsNetwork) and network.chips_per_host > _HOST_CHIPS
    return "trtllm_two_sided" if is_domain else "deepep"
