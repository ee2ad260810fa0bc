"""Zero Bubble: the committed rows are what the command computes, and the counts are the paper's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshweave.cli.app import run_app
from meshweave_studies.published import published_rows
from meshweave_studies.zero_bubble.models import MODELS, SEQUENCE, Slots
from meshweave_studies.zero_bubble.readings import PROFILED, READINGS, hosts, product_s
from meshweave_studies.zero_bubble.rows import MEMORY, OURS, PAPER, memory, rows
from meshweave_studies.zero_bubble.study import (
    ONE_F_ONE_B,
    ZB_1P,
    ZB_2P,
    TrainingRun,
    ZeroBubbleStudy,
    pipeline_problem,
    schedule_of,
    simulate_run,
    transfer_s,
)

COMMITTED = Path(__file__).parents[2] / "validation" / "results" / "zero-bubble-dgx-a100.json"
LAYER = Slots(1, False, False)
QUICK = (
    *(("zb_1p_flops", "1.5B, 24"), ("zb_1p_profiled", "1.5B, 24"), ("zb_2p_kernels", "6.2B, 24")),
    *(("memory_1f1b", "1.5B"), ("memory_zb_2p", "6.2B")),
)


@pytest.fixture(scope="module")
def study() -> ZeroBubbleStudy:
    return ZeroBubbleStudy()


def committed() -> dict[tuple[str, str], dict[str, object]]:
    data = json.loads(COMMITTED.read_text(encoding="utf-8"))
    return {(row["id"], row["model"]): row for row in data["rows"]}


def test_every_row_is_computed() -> None:
    ids = [row.id for row in published_rows(PAPER)]
    assert len(ids) == len(set(ids)) and set(ids) == set(OURS)
    assert set(committed()) == {(row.id, model) for row in published_rows(PAPER) for model in row.models}


def test_a_published_gain_is_the_quotient_of_two_throughputs() -> None:
    published = {row.id: row for row in published_rows(PAPER)}
    assert published["zb_1p_flops"].values == published["zb_1p_profiled"].values
    assert published["zb_1p_flops"].values["1.5B, 24"] == pytest.approx(12.9 / 11.8)
    assert "by kernels" in published["zb_2p_kernels"].what


@pytest.mark.parametrize(("name", "subject"), QUICK)
def test_rows_are_as_committed(study: ZeroBubbleStudy, name: str, subject: str) -> None:
    (entry,) = (row for row in published_rows(PAPER) if row.id == name)
    assert rows.row(study, entry, subject).to_json() == committed()[name, subject]


@pytest.mark.slow
def test_all_rows_are_as_committed(study: ZeroBubbleStudy) -> None:
    assert [row.to_json() for row in rows(study)] == list(committed().values())


def test_goals_are_met_by_every_reading() -> None:
    saved = committed()
    assert all(saved[f"mean_error_{reading}", "all"]["verdict"] == "holds" for reading in READINGS)
    assert all(saved["memory_order", model]["verdict"] == "holds" for model in MODELS)


# --- counts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_parameters_of_their_names(name: str) -> None:
    model = MODELS[name]
    layers = model.layers * model.parameters(LAYER)
    one_table = model.parameters(Slots(0, False, True))
    assert f"{(layers + one_table) / 1e9:.1f}B" == name
    stages = model.stages()
    assert sum(stage.layers for stage in stages) == model.layers
    assert stages[0].layers == stages[-1].layers == stages[1].layers - 1
    assert len(model.stages(model.most_stages_per_gpu)) == model.layers + 2


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_counts_as_in_the_papers_table_1(name: str) -> None:
    model = MODELS[name]
    s, b, h, a = SEQUENCE, model.micro_batch, model.hidden, model.heads
    stash = model.stash(LAYER)
    assert stash.from_forward == s * b * (34 * h + 5 * a * s)
    assert stash.until_weight_grad + stash.from_input_grad == 32 * s * b * h
    assert model.flops(LAYER) == (
        s * b * h * (24 * h + 4 * s),
        s * b * h * (24 * h + 8 * s),
        24 * s * b * h * h,
    )


def test_kernels_are_priced_by_their_shapes() -> None:
    cluster = hosts(MODELS["1.5B"])
    kernels = cluster.chip.kernels
    assert kernels is not None and kernels.product("float16") is not None
    whole, half = (product_s(cluster, size, 256, 64) for size in (8192, 4096))
    assert half > 0.5 * whole  # a launch and a part of a wave are not halved


def test_profiled_times_are_those_of_the_simulated_parts_and_transfers() -> None:
    model, times = MODELS["14.6B"], PROFILED["14.6B"]
    read = READINGS["profiled"](model, 1)
    assert read.parts[3] == pytest.approx(
        (times.forward / 1e3, times.input_grad / 1e3, times.weight_grad / 1e3)
    )
    seconds = [transfer_s(read.cluster, model, gpu) for gpu in (0, 7)]
    assert seconds == pytest.approx([times.transfer / 1e3] * 2)
    split = READINGS["profiled"](model, 3)
    assert sum(split.parts[0]) * 3 == pytest.approx(sum(read.parts[0]))


# --- steps --------------------------------------------------------------------------------------------------


def test_a_step_is_never_shorter_than_its_parts() -> None:
    model = MODELS["1.5B"]
    busy_s = 16 * sum(READINGS["profiled"](model, 1).parts[0])
    steps = {name: simulate_run(TrainingRun("1.5B", name, 16), "profiled") for name in MEMORY.values()}
    assert min(step.step_s for step in steps.values()) >= busy_s
    assert steps[ZB_2P].step_s < steps[ZB_1P].step_s < steps[ONE_F_ONE_B].step_s
    assert steps[ONE_F_ONE_B].peak_bytes < steps[ZB_2P].peak_bytes


def test_zero_bubble_schedules_keep_their_limit() -> None:
    model = MODELS["6.2B"]
    times = READINGS["profiled"](model, 1)
    problem = pipeline_problem(model, 1, times, 12)
    for name, stashes in ((ZB_1P, 1), (ZB_2P, 2)):
        schedule = schedule_of(TrainingRun("6.2B", name, 12), model, problem, times)
        forwards = max(_most_in_flight([action.kind.value for action in order]) for order in schedule.actions)
        assert forwards <= stashes * model.gpus


def _most_in_flight(kinds: list[str]) -> int:
    live = most = 0
    for kind in kinds:
        live += (kind == "F") - (kind == "I")
        most = max(most, live)
    return most


def test_memory_of_a_model_does_not_depend_on_more_micro_batches() -> None:
    study = ZeroBubbleStudy()
    short = study.step(TrainingRun("1.5B", ONE_F_ONE_B, 24), "flops").peak_bytes
    assert study.step(TrainingRun("1.5B", ONE_F_ONE_B, 32), "flops").peak_bytes == short
    assert memory(study, "1.5B", schedule=ONE_F_ONE_B).value == short / 1e9


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["reproduce", "zero-bubble", "--rows", "memory_1f1b", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["paper"] == PAPER and {row["id"] for row in data["rows"]} == {"memory_1f1b"}
    assert run_app(["reproduce", "zero-bubble", "--rows", "speed"]) == 2
    assert "there is no row 'speed'" in capsys.readouterr().err
