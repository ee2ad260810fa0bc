"""Plan files: whole descriptions that round trip, older formats, and every verb in another folder."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshweave.algorithms.step import load_stack
from meshweave.base.errors import DescriptionError
from meshweave.cli.app import app
from meshweave.describe.catalog import clusters, kernel_constants_names, models
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster, cluster_from, load_cluster
from meshweave.describe.machine.cluster_table import cluster_table
from meshweave.describe.machine.host import HostRates
from meshweave.describe.machine.kernels import (
    AttentionConstants,
    ChipKernels,
    CollectiveConstants,
    ProductConstants,
    ProductTable,
)
from meshweave.describe.machine.kernels_file import load_kernels
from meshweave.describe.machine.links import COMM_KINDS, CommConstants, NetworkAxis
from meshweave.describe.machine.network import (
    FullMeshNetwork,
    HostsNetwork,
    Network,
    RingNetwork,
    SwitchNetwork,
    TorusNetwork,
)
from meshweave.describe.machine.tree import TreeLevel, TreeNetwork
from meshweave.describe.model import Transformer, load_model
from meshweave.describe.model.architecture import Architecture, NotPriced
from meshweave.describe.model.hugging_face import transformer_from_config
from meshweave.describe.model.model_file import model_table, transformer_from
from meshweave.describe.model.workload import Workload
from meshweave.tune.plan import Plan
from meshweave.tune.plan_description import (
    catalog_differences,
    planned_cluster,
    planned_model,
    planned_problem,
)
from meshweave.tune.plan_file import load_plan
from meshweave.tune.search import plan_model
from meshweave.tune.step_cases import planned_step
from meshweave.tune.step_search.planner import plan as plan_steps

CONFIG = {
    "model_type": "mistral", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 1000, "hidden_act": "silu",
    "sliding_window": 256, "rope_theta": 1e4, "rms_norm_eps": 1e-5,
    "attn_logit_softcapping": 50.0,
}  # fmt: skip


SMALL = ["--ranks", "2", "--layer", "out", "--max-dim", "32"]


def random_axis(draw: random.Random, name: str) -> NetworkAxis:
    kinds = [kind for kind in COMM_KINDS if draw.random() < 0.5]
    constants = tuple((kind, CommConstants(draw.uniform(1, 1e12), draw.random(), 1e-6)) for kind in kinds)
    return NetworkAxis(
        name, draw.uniform(1, 1e12), draw.random() / 1e3, draw.choice([1, 2]), constants, draw.random() / 1e3,
        draw.choice(["", "a \"source\" \\ with\nlines"]), draw.choice([0, 65536]),
    )  # fmt: skip


def random_network(draw: random.Random) -> Network:
    one, two = random_axis(draw, "one"), random_axis(draw, "two")
    port = replace(one, num_directions=1)
    return draw.choice(
        [
            RingNetwork(one, draw.randint(1, 9)),
            SwitchNetwork(port, draw.randint(1, 9)),
            TorusNetwork((one, two), (2, 3), 6),
            TorusNetwork((one, two), None, 8, True, 2, 64),
            HostsNetwork(draw.randint(1, 5), 8, port, 4, two),
            FullMeshNetwork(2, 3, one, two),
            TreeNetwork((TreeLevel(4, one, 2, two), TreeLevel(2, two))),
        ]
    )


def random_kernels(draw: random.Random) -> ChipKernels:
    def product() -> ProductConstants:
        return ProductConstants(
            "gpu", 132, draw.uniform(1, 1e15), 1e9, 1e-6, draw.random(), 1e12, draw.random()
        )

    same = product()
    return ChipKernels(
        "mine",
        "a test",
        (("bfloat16", same), ("float16", same), ("float32", product())),
        (("bfloat16", AttentionConstants(8, 64, 1e12, 1e-9, draw.random(), 1e12)),),
        (("all_gather", CollectiveConstants(1e-6, 1e-6, 1e9, 1e-6, 1e-7, 1e11, 1e-9, draw.random())),),
        draw.choice([None, (1e-6, 1e12)]),
        draw.choice(
            [(), (("bfloat16", ProductTable(((1, 2, 3, 1e-6), (4, 5, 6, draw.random())), "points")),)]
        ),
        draw.choice(["model", "error"]),
        draw.random() < 0.5,
        draw.choice([1.0, 0.7]),
    )


def random_cluster(draw: random.Random) -> Cluster:
    kernels = random_kernels(draw) if draw.random() < 0.5 else None
    chip = Chip(
        "chip", (("bfloat16", draw.uniform(1, 1e15)), ("float32", 1e13)), draw.uniform(1, 1e15),
        draw.randint(1, 2**60), draw.uniform(1, 1e13), draw.random(), draw.choice(["", "its own"]),
        None if kernels else draw.choice([None, (128, 128, 64)]), draw.random(),
        draw.choice([(), (("float32", 2e13),)]), draw.choice([(), (("norm", 3e12),)]), kernels, draw.random(),
        draw.choice([0.0, 1e9]), draw.choice(["", "h100"]),
    )  # fmt: skip
    host = draw.choice([None, HostRates(draw.random(), 0.0, 1e-6, draw.random(), waits=True)])
    return Cluster("mine", chip, random_network(draw), "a test", host, draw.choice(["", "a note"]), 7)


def random_model(draw: random.Random) -> Transformer:
    groups = draw.randint(1, 8)
    own = Architecture(
        draw.choice(["", "llama"]), draw.choice([None, "rms"]), draw.choice([None, 1e-5]), "silu",
        draw.choice([None, True, False]), None, False, draw.choice([None, "rotary"]), draw.choice([None, 2048]),
        draw.choice([None, 1e4]), None, draw.choice(["", '{"factor": 2.0}']), draw.choice([None, 4096]),
        draw.choice([None, 1]), draw.choice(["", "parallel"]), draw.choice(["", "before and after"]),
        draw.choice([None, True]), draw.choice([None, 0.02]), draw.choice([(), ("logit_scale = 2",)]),
    )  # fmt: skip
    said = [NotPriced("something", 0)]
    if own.window:
        said.append(NotPriced("its window", own.window))
    if own.max_positions:
        said.append(NotPriced("its positions", own.max_positions))
    sizes = (
        draw.randint(1, 99),
        draw.randint(1, 9999),
        groups * draw.randint(1, 8),
        groups,
        64,
        draw.randint(1, 9999),
    )
    words, gated, tied = draw.choice([None, 99]), draw.random() < 0.5, draw.random() < 0.5
    return Transformer("mine", *sizes, words, gated, "a test", tied, own, tuple(said))


def through_json(table: dict[str, Any]) -> dict[str, Any]:
    back: dict[str, Any] = json.loads(json.dumps(table, allow_nan=False))
    return back


@pytest.mark.parametrize("seed", range(40))
def test_random_descriptions_survive_their_tables(seed: int) -> None:
    draw = random.Random(seed)
    cluster, model = random_cluster(draw), random_model(draw)
    back = cluster_from(through_json(cluster_table(cluster)), "plan")
    assert back == cluster and back.note == cluster.note
    assert transformer_from(through_json(model_table(model)), "plan") == model


def test_the_catalog_survives_its_tables() -> None:
    for name in clusters():
        cluster = load_cluster(name)
        assert cluster_from(through_json(cluster_table(cluster)), "plan") == cluster
    for name in models():
        model = load_model(name)
        assert transformer_from(through_json(model_table(model)), "plan") == model
    own = load_cluster("dgx-h100")
    for name in kernel_constants_names():
        other = replace(own, chip=replace(own.chip, kernels=load_kernels(name)))
        assert cluster_from(through_json(cluster_table(other)), "plan") == other


def step_plan(**options: Any) -> Plan:
    model, cluster = transformer_from_config(CONFIG, "mine/config.json"), load_cluster("dgx-h100:8")
    return plan_steps(model, cluster, batch=16, sequence=512, tp=2, strategy="megatron_sp", **options)


def test_a_plan_keeps_what_it_was_priced_with(tmp_path: Path) -> None:
    given = {"attention": "plain", "stack": load_stack("torchtitan"), "gradient_dtype": "bfloat16", "zero": 2}
    made = step_plan(**given)
    made.save(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    assert plan == made and plan.not_priced == ("soft cap of 50.0 on attention scores not priced",)
    assert planned_problem(plan).model.layer.attentions[0].window == 256
    problem = planned_problem(plan)
    assert (problem.attention, problem.stack.name, problem.gradient_dtype) == (
        "plain",
        "torchtitan",
        "bfloat16",
    )
    assert planned_step(plan).time_s == plan.step.best.step_s
    own = replace(load_stack("nanotron"), host=HostRates(kernel_s=1e-5, layer_s=1e-4))
    other = step_plan(stack=own, zero=1)
    again = Plan.model_validate_json(other.model_dump_json())
    assert again == other and planned_problem(again).stack == own


@pytest.mark.parametrize(
    "verbs",
    [
        [
            ["export", "step.json", "--to", "megatron-lm"],
            ["export", "step.json", "--to", "torchtitan"],
            ["export", "step.json", "--to", "hf"],
            ["simulate", "step.json"],
            ["simulate", "products.json", "--layer", "ff1", "--pass", "forward"],
        ],
        pytest.param(
            [
                ["verify", "products.json", *SMALL, "--algorithm", "collective"],
                [
                    "run",
                    "products.json",
                    *SMALL,
                    "--pass",
                    "forward",
                    "--repeat",
                    "2",
                    "--machine",
                    "local-cpu",
                ],
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_plan_of_own_files_runs_where_they_are_not(
    verbs: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "mine").mkdir(parents=True)
    there.mkdir()
    (here / "mine/config.json").write_text(json.dumps(CONFIG))
    catalog = CliRunner().invoke(app, ["catalog", "dgx-h100", "--toml"]).stdout
    kernels = CliRunner().invoke(app, ["catalog", "h100-sxm5-80gb", "--toml"])
    text = catalog.replace('name = "dgx-h100"', 'name = "my-own"', 1)
    if kernels.exit_code == 0:
        (here / "own-kernels.toml").write_text(kernels.stdout)
        text = text.replace('kernels = "h100-sxm5-80gb"', 'kernels = "own-kernels.toml"')
    (here / "box.toml").write_text(text)
    monkeypatch.chdir(here)
    common = ["--cluster", "box.toml:8", "--batch", "16", "--sequence", "512"]
    fix = "tp=2,zero=1,strategy=megatron_sp"
    step = ["plan", "mine", *common, "--fix", fix, "--out", str(there / "step.json")]
    products = ["plan", "mine", *common, "--products", "--out", str(there / "products.json")]
    for words in (step, products):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert "note: soft cap of 50.0 on attention scores not priced" in result.stdout
    for path in sorted(here.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    monkeypatch.chdir(there)
    assert load_plan(Path("step.json")).model == "mine" and load_plan(Path("step.json")).cluster == "my-own"
    assert planned_step(load_plan(Path("step.json"))).time_s == load_plan(Path("step.json")).step.best.step_s
    for words in verbs:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{words}: {result.output} {result.exception}"
        is_said = "note: soft cap of 50.0 on attention scores not priced" in result.stderr
        assert is_said == ("step.json" in words)  # products have no attention


def older(plan: Plan, **changes: Any) -> dict[str, Any]:
    """A plan as files of format 2 have it."""
    data = json.loads(plan.model_dump_json())
    return {**{k: v for k, v in data.items() if k != "description"}, "format": "meshweave-plan-2", **changes}


def test_older_files_take_the_catalog(tmp_path: Path) -> None:
    path, plan = tmp_path / "plan.json", step_plan(zero=1)
    path.write_text(json.dumps(older(plan)))
    with pytest.raises(DescriptionError, match="older format, without its model"):
        planned_model(load_plan(path))
    path.write_text(json.dumps(older(plan, model="llama-2-7b")))
    old = load_plan(path)
    assert planned_model(old) == load_model("llama-2-7b")
    assert planned_cluster(old) == load_cluster("dgx-h100:8")
    path.write_text(json.dumps(older(plan, cluster="elsewhere", model="llama-2-7b")))
    with pytest.raises(DescriptionError, match="give --cluster FILE"):
        planned_step(load_plan(path))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d: d.pop("description"), "description: meshweave-plan-3 has no"),
        (lambda d: d.update(format="meshweave-plan-2"), "description: meshweave-plan-2 has a"),
        (lambda d: d["description"].update(more=1), "description.more: unknown key"),
        (lambda d: d["description"]["model"].update(hiden=1), "description.model: hiden: unknown key"),
        (lambda d: d["description"]["model"].update(hidden=-1), "description.model: hidden: -1 is not valid"),
        (lambda d: d["description"]["cluster"]["chip"].update(gpu="nowhere.toml"), "nowhere.toml"),
        (lambda d: d["description"]["settings"].update(atention=1), "settings.atention: unknown key"),
        (lambda d: d["description"]["settings"].update(attention="x"), "unknown attention 'x'"),
        (lambda d: d["description"]["settings"].update(stack={"nam": 1}), "settings.stack"),
        (lambda d: d.update(model="other"), "mine is not the plan's other"),
    ],
)
def test_a_wrong_description_is_refused_by_its_key(change: Any, words: str, tmp_path: Path) -> None:
    path, data = tmp_path / "plan.json", json.loads(STEP_PLAN)
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(DescriptionError, match=words.replace("(", r"\(")) as caught:
        load_plan(path)
    assert str(path) in str(caught.value)


STEP_PLAN = step_plan(zero=1, pp=1, micro_batch=1, recompute="none").model_dump_json()


def test_what_is_not_the_catalogs_is_said(tmp_path: Path) -> None:
    workload = Workload(16, 2048)
    plan = plan_model(load_model("llama-2-7b"), load_cluster("dgx-h100:8"), workload, ["collective"])
    assert catalog_differences(plan) == ()
    assert plan.description is not None
    data = json.loads(plan.model_dump_json())
    data["description"]["model"]["hidden"] = 8192
    data["description"]["cluster"]["chip"]["memory_bytes"] = 10**9
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    said = catalog_differences(load_plan(path))
    assert [sentence.split(" is not ")[0] for sentence in said] == [
        "the plan's model llama-2-7b",
        "the plan's cluster dgx-h100",
    ]
    result = CliRunner().invoke(app, ["simulate", str(path), "--layer", "ff1", "--pass", "forward"])
    assert f"note: {said[0]}" in result.stderr, result.output
    result = CliRunner().invoke(app, ["simulate", str(path), "--layer", "none", "--pass", "forward"])
    assert result.exit_code and "note: " not in result.stderr, result.output
