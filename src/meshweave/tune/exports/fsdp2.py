"""A plan as settings of what composes torch's FSDP2 with tensor and context parallelism: accelerate and axolotl.

Both make the same mesh (accelerate/parallelism_config.py of 1.15; axolotl/utils/distributed.py of 0.19): replicas,
shards, context, tensor, outermost first.
"""

from __future__ import annotations

import json
from typing import Any

from meshweave.base.errors import UnsupportedError
from meshweave.describe.machine.network import HostsNetwork
from meshweave.tune.exports.model_words import MEGATRON_ORDER, model_left_out, order_sentence, step_left_out
from meshweave.tune.exports.row import Export, PlannedRow
from meshweave.tune.plan_description import planned_cluster

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}


def to_accelerate(row: PlannedRow) -> Export:
    """Return the file for `accelerate launch --config_file FILE.json`.

    Raises:
        UnsupportedError: accelerate has no such strategy, or the row has pipelines, degrees of experts, or
            replicas of whole weights with tensor or context parallelism.
    """
    plan, degrees = row.plan, row.degrees
    sizes, left_out = _mesh(row, "accelerate")
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP"
        if sizes["dp_shard_size"] > 1
        else "MULTI_GPU"
        if degrees.data > 1
        else "NO",
        "mixed_precision": _DTYPES.get(plan.dtype, "no"),
        "num_processes": degrees.num_chips,
        **_hosts(row, left_out),
        "use_cpu": False,
        "debug": False,
    }
    if sizes["dp_shard_size"] > 1:
        settings["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": degrees.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": degrees.recompute != "none",
        }
        settings["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    elif degrees.recompute != "none":
        left_out.append("Recomputation without FSDP is gradient_checkpointing of the Trainer.")
    left_out.append(
        f"Sequences of {plan.sequence} tokens, a micro-batch of {degrees.micro_batch}, and {row.accumulated} "
        f"of them a step for the batch of {plan.batch}, are the training script's to set."
    )
    left_out += model_left_out(row.model, (), "accelerate, which is given a model,")
    left_out += step_left_out(row, (), "accelerate")
    return Export("accelerate", settings, json.dumps(settings, indent=2), tuple(left_out))


def _hosts(row: PlannedRow, left_out: list[str]) -> dict[str, Any]:
    """Return the number of hosts, where they are described, and say what each host has to add."""
    network = planned_cluster(row.plan).network
    if not isinstance(network, HostsNetwork):
        left_out.append(
            f"The hosts of {row.plan.cluster} are not described: where there are several, add num_machines, and "
            "machine_rank and main_process_ip on each."
        )
        return {}
    hosts = -(-row.degrees.num_chips // network.chips_per_host)
    if hosts > 1:
        left_out.append(
            "The number of a host and the address of the first are known when it starts: give --machine_rank, "
            "--main_process_ip and --main_process_port to accelerate launch on each host, as --launch writes them."
        )
    return {"num_machines": hosts}


def to_axolotl(row: PlannedRow) -> Export:
    """Return the settings of parallelism, batch and precision for a file of axolotl; JSON is YAML too.

    Raises:
        UnsupportedError: the row has tensor parallelism, pipelines, degrees of experts, or replicas of whole
            weights with context parallelism.
    """
    plan, degrees = row.plan, row.degrees
    sizes, left_out = _mesh(row, "axolotl")
    if row.tensor > 1:
        raise UnsupportedError(
            "axolotl 0.19 has tensor parallelism by DeepSpeed alone; export to deepspeed, and name its file there"
        )
    settings: dict[str, Any] = {
        "sequence_len": plan.sequence,
        "micro_batch_size": degrees.micro_batch,
        "gradient_accumulation_steps": row.accumulated,
        "bf16": plan.dtype == "bfloat16",
        "fp16": plan.dtype == "float16",
        "context_parallel_size": degrees.context,
        "gradient_checkpointing": degrees.recompute != "none",
    }
    if sizes["dp_shard_size"] > 1:
        settings |= {
            "dp_shard_size": sizes["dp_shard_size"],
            "fsdp_version": 2,
            "fsdp_config": {
                "reshard_after_forward": degrees.zero == 3,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            },
        }
    elif degrees.data > 1:
        settings["dp_replicate_size"] = degrees.data
    if degrees.context > 1:
        settings["attn_implementation"] = "flash_attention_2"  # axolotl's rings have no other
        left_out.append("Context parallelism of axolotl needs its extra ring-flash-attn.")
    left_out.append(f"It counts for {degrees.num_chips} ranks: start so many.")
    left_out += model_left_out(row.model, (), "axolotl, whose base_model names it,")
    left_out += step_left_out(row, (), "axolotl")
    return Export("axolotl", settings, json.dumps(settings, indent=2), tuple(left_out))


def _mesh(row: PlannedRow, target: str) -> tuple[dict[str, int], list[str]]:
    """Return the sizes of the mesh by their names, and what of the degrees they do not say.

    Raises UnsupportedError where replicas whose weights are whole have tensor or context parallelism: FSDP2 has no
    axis to shard over then, and accelerate refuses it.
    """
    degrees = row.degrees
    row.require_megatron(target)
    row.require_no_pipeline(target)
    row.require_dense(target)
    is_sharded = degrees.zero > 0 and degrees.data > 1
    if row.tensor * degrees.context > 1 and not is_sharded:
        raise UnsupportedError(
            f"{target} has tensor and context parallelism beside FSDP alone, which needs data-parallel ranks and "
            "a ZeRO level"
        )
    left_out = []
    if is_sharded and degrees.zero < 3:
        left_out.append(
            f"ZeRO {degrees.zero} keeps weights whole; FSDP2 shards them as well, and gathers them once a step, "
            "for they are not resharded after the forward pass."
        )
    if row.plan.dtype not in _DTYPES:
        left_out.append(f"Products are in {row.plan.dtype}, for which {target} has no word here.")
    if row.is_sequence_parallel:
        left_out.append(
            f"{degrees.strategy} shares the tokens between the matrices of a layer; the model's tp_plan says "
            f"whether {target} does."
        )
    if tuple(degrees.order) != MEGATRON_ORDER:
        left_out.append(order_sentence(degrees.order, f"{target} always has tensor, context, data"))
    if degrees.recompute == "selective":
        left_out.append(f"Selective recomputation is not {target}'s, which computes whole layers again.")
    sharded, whole = (degrees.data, 1) if is_sharded else (1, degrees.data)
    sizes = {
        "dp_replicate_size": whole,
        "dp_shard_size": sharded,
        "cp_size": degrees.context,
        "tp_size": row.tensor,
    }
    return sizes, left_out
