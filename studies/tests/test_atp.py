"""ATP: the committed rows are what the command computes, the readings differ as they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshweave.algorithms.step.software_stack import SoftwareStack
from meshweave.algorithms.table import algorithm
from meshweave.base.errors import UnsupportedError
from meshweave.cli.app import run_app
from meshweave.describe.machine.host import HostRates
from meshweave.ir.analysis.validate import validate
from meshweave_studies import papers
from meshweave_studies.atp.figures import FIGURES, figures
from meshweave_studies.atp.framework import (
    config_of,
    framework_s,
    on_one_stream,
    one_after_another,
    step_problem,
)
from meshweave_studies.atp.readings import READINGS as NAMED
from meshweave_studies.atp.readings import SIMULATED_ROWS
from meshweave_studies.atp.rows import OURS, rows
from meshweave_studies.atp.study import (
    LOAD,
    MODELS,
    READINGS,
    AtpStudy,
    Case,
    cluster_of,
    flops_per_layer,
    paper_mesh,
    with_unfused_attention,
)
from meshweave_studies.pictures import pictures
from meshweave_studies.published import published_rows

COMMITTED = Path(__file__).parents[2] / "validation" / "results" / "atp.json"
EQUATIONS = (
    *("table2", "first_link", "second_link", "second_link_corrected", "calibrated_gain"),
    *("choice", "choice_flat", "choice_printed", "choice_without_equation_4"),
    *("atp1_rises", "atp2_falls", "atp4_falls", "optimum_falls"),
)


@pytest.fixture(scope="module")
def study() -> AtpStudy:
    return AtpStudy()


def committed(ids: tuple[str, ...]) -> dict[tuple[str, str], dict[str, object]]:
    data = json.loads(COMMITTED.read_text(encoding="utf-8"))
    return {(row["id"], row["model"]): row for row in data["rows"] if row["id"] in ids}


def test_every_row_is_computed() -> None:
    ids = [row.id for row in published_rows("atp")]
    assert len(ids) == len(set(ids)) and set(ids) == set(OURS)
    assert set(committed(tuple(ids))) == {
        (row.id, model) for row in published_rows("atp") for model in row.models
    }


def test_equations_are_as_committed(study: AtpStudy) -> None:
    saved = committed(EQUATIONS)
    computed = {(row.id, row.model): row for row in rows(study, EQUATIONS)}
    assert set(computed) == set(saved)
    for key, row in computed.items():
        assert row.to_json() == saved[key]


def test_the_choices_that_the_equations_give(study: AtpStudy) -> None:
    ids = ("choice", "choice_flat", "choice_printed", "choice_without_equation_4")
    choices = {(row.id, row.model): (row.ours, row.verdict) for row in rows(study, ids)}
    assert choices == {
        ("choice", "ic2"): (2, "differs"),
        ("choice", "ic3"): (2, "differs"),
        ("choice", "ic4"): (4, "differs"),
        ("choice_flat", "ic4-flat"): (2, "holds"),
        ("choice_printed", "ic2"): (2, "differs"),
        ("choice_printed", "ic3"): (1, "holds"),
        ("choice_printed", "ic4"): (4, "differs"),
        ("choice_printed", "ic4-flat"): (1, "differs"),
        ("choice_without_equation_4", "ic2"): (1, "holds"),
        ("choice_without_equation_4", "ic3"): (1, "holds"),
        ("choice_without_equation_4", "ic4"): (1, "differs"),
        ("choice_without_equation_4", "ic4-flat"): (2, "holds"),
    }


def test_the_page_has_the_saved_numbers_of_25d() -> None:
    """2.5D on 2 x 2 x 2 is the paper's rival on 8 GPUs: better than ATP for the smallest model on IC1 alone."""
    page = (COMMITTED.parents[1] / "papers.md").read_text(encoding="utf-8")
    saved = committed(("2d_over_atp_small_25d", "atp_over_2d_25d", "megatron_over_2d_25d"))
    ours = {key: float(str(row["ours"])) for key, row in saved.items()}
    of_ic1 = [ours["atp_over_2d_25d", f"ic1-{model}"] for model in ("m2", "m3", "m4")]
    small = ours["2d_over_atp_small_25d", "ic1-m1"]
    assert f"| IC1, M1: 2.5D over ATP | faster | {small:.0f} % faster | holds |" in page
    assert f"ATP over 2.5D | faster | {min(of_ic1):.0f} to {max(of_ic1):.0f} % faster | hold |" in page
    leads = [ours["megatron_over_2d_25d", machine] for machine in ("ic2", "ic3")]
    assert f"| significantly | {leads[0]:.0f} %, {leads[1]:.0f} % (M1) | holds, differs |" in page


@pytest.mark.slow
def test_all_rows_are_as_committed() -> None:
    saved = committed(tuple(OURS))
    for row in rows(AtpStudy()):
        expected = saved[row.id, row.model]
        assert row.ours == pytest.approx(expected["ours"]), (row.id, row.model)
        assert row.verdict == expected["verdict"]


def test_simulated_rows_are_as_committed(study: AtpStudy) -> None:
    """One machine of two layers, one of one; the rest is slow."""
    saved = committed(tuple(OURS))
    for machine, model in (("ic1", "m2"), ("ic3", "m1")):
        row = OURS["simulated_choice"](study, f"{machine}-{model}")
        assert row.value == saved["simulated_choice", f"{machine}-{model}"]["ours"]
    value = OURS["table3_chunk2"](study, "ic1-m2").value
    assert value == pytest.approx(saved["table3_chunk2", "ic1-m2"]["ours"])


def test_readings_change_what_they_say(study: AtpStudy) -> None:
    cases = {reading: Case.of("ic1-m2", reading=reading) for reading in READINGS}
    mesh = paper_mesh(cases[""])
    assert mesh == (2, 4)
    seconds = {reading: study.seconds(case, mesh, 2) for reading, case in cases.items()}
    assert all(seconds[reading] > seconds[""] for reading in READINGS if reading)
    assert seconds["four_bytes"] == pytest.approx(
        2 * seconds[""], rel=0.1
    )  # nearly all of it is communication
    assert seconds["one_stream"] < study.serial_seconds(cases[""])
    chip = with_unfused_attention(cluster_of("ic3", 8), MODELS["m1"]).chip
    assert chip.flops_per_s("float16", "attention") < chip.flops_per_s("float16") / 2


def test_one_stream_gives_the_same_result() -> None:
    entry = algorithm("atp")
    problem = next(problem for problem in entry.examples() if min(problem.mesh_shape) > 1)
    program = on_one_stream(entry.program(problem, config_of("atp", problem.mesh_shape, 2)))
    assert validate(program).skipped == ()
    used = {bound.op.lane for bound in program.ops_on_rank(0) if getattr(bound.op, "over", None)}
    assert used == {"stream"}


def test_one_after_another_takes_as_long_as_its_ops() -> None:
    entry = algorithm("atp")
    problem = next(problem for problem in entry.examples() if min(problem.mesh_shape) > 1)
    program = one_after_another(entry.program(problem, config_of("atp", problem.mesh_shape, 1)))
    assert validate(program).skipped == ()
    assert {bound.op.lane for bound in program.ops_on_rank(0)} == {"all"}


def test_a_framework_costs_time_and_hides_less() -> None:
    case = Case.of("ic3-m2")
    step = step_problem(cluster_of(case.machine, 8), MODELS[case.model], LOAD)
    serial, beside = (framework_s(step, "atp", (8, 1), 1, overlaps) for overlaps in (False, True))
    assert beside < serial
    hidden = [
        framework_s(step, "atp", (8, 1), 2, overlaps) - whole
        for overlaps, whole in ((False, serial), (True, beside))
    ]
    assert hidden[0] == pytest.approx(hidden[1]) and hidden[0] < 0  # chunks are of the forward pass alone
    bare = step_problem(cluster_of(case.machine, 8), MODELS[case.model], LOAD)
    bare = replace(bare, stack=SoftwareStack(sustains=True), attention="flash")
    assert framework_s(bare, "atp", (8, 1), 1, False) < serial
    assert AtpStudy(reading=NAMED["framework"]).seconds(case, (8, 1)) == serial
    assert AtpStudy(reading=NAMED["framework-overlap"]).seconds(case, (8, 1)) == beside


@pytest.mark.parametrize(
    ("strategy", "mesh"), [("atp", (8, 1)), ("summa_block", (2, 4)), ("25d_block", (2, 2, 2))]
)
def test_a_host_that_takes_no_time_costs_no_time(strategy: str, mesh: tuple[int, ...]) -> None:
    """Broadcasts of SUMMA end after ops that follow them; together ops take as long as the program."""
    step = step_problem(cluster_of("ic2", 8), MODELS["m2"], LOAD, has_host=True)
    assert step.host is not None and step.host.waits and step.stack.gap_s == 0
    bare, slow = (
        replace(step, stack=replace(step.stack, host=host)) for host in (None, HostRates(1e-3, waits=True))
    )
    free = replace(step, stack=replace(step.stack, host=HostRates(waits=True)))
    without, with_free, with_host, with_slow = (
        framework_s(one, strategy, mesh, 1, False) for one in (bare, free, step, slow)
    )
    assert with_free == pytest.approx(without, rel=1e-9)
    assert without < with_host < with_slow


def test_twice_the_collectives_wait_for_a_host_twice() -> None:
    """Section 5.3: more groups degrade small models by what they add, and hardly the largest one."""
    with_host, without = (AtpStudy(reading=NAMED[name]) for name in ("framework-host", "framework"))
    for model, best in (("m1", (8, 1)), ("m4", (4, 2))):
        case = Case.of(f"ic3-{model}")
        assert with_host.best_mesh(case) == best and without.best_mesh(case) == (4, 2)


def test_readings_of_a_framework_cover_rows_that_are_there() -> None:
    assert set(SIMULATED_ROWS) <= set(OURS)
    with pytest.raises(UnsupportedError, match="says nothing about row table2"):
        papers.reproduce_atp(papers.select("atp", ["table2"]), reading="framework")
    with pytest.raises(UnsupportedError, match="has no figures"):
        papers.reproduce_atp(papers.select("atp", figures=["10"]), reading="framework")


def test_flops_are_those_of_table_2() -> None:
    assert [flops_per_layer(model) / 2**40 for model in MODELS.values()] == [2.625, 9.75, 37.5, 83.25]


def test_figure_12(study: AtpStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshweave_studies.atp.figures.SIMULATED_SIZES", (2, 4))
    drawn = FIGURES[12](study)
    optimum = drawn.panels[0].columns.index("optimum")
    expected = ["ATP-1", "ATP-1", "ATP-2", "ATP-2", "ATP-4", "ATP-4", "ATP-8", "ATP-8", "ATP-16"]
    assert [row[optimum] for panel in drawn.panels for row in panel.rows] == expected * 2
    assert set(pictures(drawn)) == {"ic5", "ic6"}
    assert all(svg.startswith("<svg") for svg in pictures(drawn).values())


def test_figures_10_and_11_have_every_case(study: AtpStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshweave_studies.atp.figures.MACHINES", ("ic3",))
    monkeypatch.setattr("meshweave_studies.atp.figures.MODELS", {"m1": MODELS["m1"]})
    ten, eleven = figures(study, (10, 11))
    assert eleven.panels[0].columns == ("model", "ATP-1", "ATP-2", "ATP-4")
    assert len(ten.panels[0].rows) == 1 and ten.panels[0].rows[0][2] == eleven.panels[0].rows[0][1]
    assert "ic3" in pictures(ten)


def test_the_verb(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_app(["reproduce", "atp", "--rows", "table2,first_link", "--out", str(tmp_path)]) == 0
    assert "0 count; 5 listed" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "atp.json").read_text())["paper"] == papers.ATP
    assert run_app(["reproduce", "atp", "--rows", "nope"]) == 2
    assert "there is no row 'nope'" in capsys.readouterr().err
