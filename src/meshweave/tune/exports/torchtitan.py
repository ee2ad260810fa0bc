"""A plan as overrides of a torchtitan config (torchtitan/config/configs.py of torchtitan 0.3.0)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshweave.base.errors import UnsupportedError
from meshweave.tune.exports.model_words import MEGATRON_ORDER, model_left_out, order_sentence, step_left_out
from meshweave.tune.exports.row import Export, PlannedRow


def to_torchtitan(row: PlannedRow) -> Export:
    """Return the torchtitan config overrides of a row of a plan.

    Raises UnsupportedError where torchtitan lacks the row's strategy, schedule or expert parallelism, or where
    ranks would get unequal shares of heads or of a sequence.
    """
    plan, degrees = row.plan, row.degrees
    row.require_megatron("torchtitan")
    row.require_even_shares("torchtitan")
    left_out: list[str] = []
    parallelism: dict[str, Any] = {
        "tensor_parallel_degree": row.tensor,
        "enable_sequence_parallel": row.is_sequence_parallel,
        "context_parallel_degree": degrees.context,
        "pipeline_parallel_degree": degrees.pipeline,
        **_data_parallel(row, left_out),
        **_pipeline(row, left_out),
    }
    if degrees.context > 1:
        parallelism["context_parallel_load_balancer"] = None
    if row.model.is_routed:
        if degrees.expert_tensor > 1:
            raise UnsupportedError(
                f"torchtitan keeps experts whole, and not on {degrees.expert_tensor} ranks each"
            )
        sharing = row.tensor * degrees.context * (degrees.data if degrees.zero else 1)
        if sharing % degrees.expert:
            raise UnsupportedError(
                f"torchtitan has ranks of experts among those that share or shard the weights of a layer, "
                f"{sharing} here, which expert {degrees.expert} does not divide; ZeRO 1 to 3 shards over data "
                f"{degrees.data}"
            )
        parallelism["expert_parallel_degree"] = degrees.expert
    training: dict[str, Any] = {
        "local_batch_size": degrees.micro_batch if degrees.pipeline == 1 else plan.batch // degrees.data,
        "global_batch_size": plan.batch,
        "seq_len": plan.sequence,
    }
    if degrees.pipeline > 1:
        training["disable_cuda_graphs"] = True  # torchtitan 0.3.0 captures no pipelines
    if plan.dtype in ("bfloat16", "float32"):
        training["mixed_precision_param"] = plan.dtype
    else:
        left_out.append(f"Products are in {plan.dtype}; torchtitan computes in bfloat16 or float32.")
    if tuple(degrees.order) != MEGATRON_ORDER:
        left_out.append(order_sentence(degrees.order, f"torchtitan always has {', '.join(MEGATRON_ORDER)}"))
    if degrees.recompute == "selective":
        left_out.append(
            "Selective recomputation here computes attention again; torchtitan's saves the results of listed "
            "ops, attention among them, and computes the rest again."
        )
    left_out += model_left_out(row.model, (), "torchtitan, whose --model.flavor names it,")
    left_out += step_left_out(row, (), "torchtitan")
    settings: dict[str, Any] = {
        "parallelism": parallelism,
        "training": training,
        "activation_checkpoint": degrees.recompute,
    }
    words = [f"activation_checkpoint:{degrees.recompute}"]
    for table in ("parallelism", "training"):
        words += [_argument(table, name, value) for name, value in settings[table].items()]
    return Export("torchtitan", settings, " \\\n".join([*words[1:], words[0]]), tuple(left_out))


def _argument(table: str, name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{table}.{'' if value else 'no-'}{name.replace('_', '-')}"
    return f"--{table}.{name.replace('_', '-')} {value}"


def _data_parallel(row: PlannedRow, left_out: list[str]) -> dict[str, Any]:
    degrees = row.degrees
    if degrees.zero == 0:
        return {"data_parallel_replicate_degree": degrees.data, "data_parallel_shard_degree": 1}
    if degrees.zero < 3:
        left_out.append(
            f"ZeRO {degrees.zero} keeps weights whole; FSDP2 shards them as well, and gathers them once a step "
            "where they are not resharded after the forward pass."
        )
    return {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": degrees.data,
        "fsdp_reshard_after_forward": "always" if degrees.zero == 3 else "never",
    }


def _pipeline(row: PlannedRow, left_out: list[str]) -> dict[str, Any]:
    degrees = row.degrees
    if degrees.pipeline == 1:
        return {}
    name, theirs = row.schedule.name, row.schedule.names_elsewhere.get("torch")
    if theirs is None:
        raise UnsupportedError(
            f"torch.distributed.pipelining has no schedule {name}; write it as a file with `meshweave pipeline "
            f"{name} --out FILE.csv`, and give that as parallelism.pipeline_parallel_schedule_csv"
        )
    settings: dict[str, Any] = {
        "pipeline_parallel_schedule": theirs,
        "pipeline_parallel_microbatch_size": degrees.micro_batch,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    }
    stages, layers = row.stage_layers, row.model.num_layers
    count = len(stages)
    rule = tuple(layers // count + (number < layers % count) for number in range(count))
    if stages != rule:
        left_out.append(
            f"{layers} layers are not shared out evenly to the stages: they have {_listed(stages)}; torchtitan "
            f"gives them {_listed(rule)} unless module_fqns_per_model_part says how."
        )
    if row.num_layers_per_stage is not None:
        settings["pipeline_parallel_layers_per_stage"] = row.num_layers_per_stage
    elif degrees.virtual_stages > 2:  # not told, it makes one or two of a rank
        most = -(-layers // count)
        if -(-layers // most) != count:
            raise UnsupportedError(
                f"torchtitan counts stages by their layers: {most} of {layers} make {-(-layers // most)} stages, "
                f"and not {count}; mw.pipeline runs that"
            )
        settings["pipeline_parallel_layers_per_stage"] = most
    return settings


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))
