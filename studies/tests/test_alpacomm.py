"""Figures 5 to 9 of AlpaComm, and what its text says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshweave.algorithms.reshard import plan_reshard, reshard_program, unit_tasks
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.cli.app import run_app
from meshweave.describe.machine.cluster import load_cluster
from meshweave.ir.analysis.validate import validate
from meshweave_studies import papers
from meshweave_studies.alpacomm import rows as paper
from meshweave_studies.alpacomm import study as alpacomm_study
from meshweave_studies.alpacomm import training_rows
from meshweave_studies.alpacomm.cases import CASES
from meshweave_studies.alpacomm.figures import FIGURES, figures, picture
from meshweave_studies.alpacomm.study import (
    ALL_GATHER,
    BROADCAST,
    EXACT,
    GPUS_PER_HOST,
    LOCAL,
    NAIVE,
    OWN_ORDER,
    RECEIVING_HOSTS,
    RIVAL_ORDER,
    SEND_RECV,
    AlpaCommStudy,
    orders,
)
from meshweave_studies.published import published_rows
from sampling import mostly_slow

SMALL = (24, 16, 8)


@pytest.fixture(scope="module")
def study() -> AlpaCommStudy:
    return AlpaCommStudy(load_cluster("p3.8xlarge"))


# --- the cases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", CASES)
@pytest.mark.parametrize("strategy", [SEND_RECV, ALL_GATHER, BROADCAST])
def test_cases_give_right_programs(study: AlpaCommStudy, number: int, strategy: str) -> None:
    problem = CASES[number].problem(SMALL)
    validate(reshard_program(plan_reshard(problem, study.network, strategy=strategy)))


def test_cases_have_the_unit_tasks_of_the_paper() -> None:
    counts = {number: len(unit_tasks(case.problem())) for number, case in CASES.items()}
    assert counts == {1: 2, 2: 2, 3: 4, 4: 64, 5: 4, 6: 4, 7: 4, 8: 1, 9: 4}


def test_meshes_take_the_first_chips_of_their_hosts() -> None:
    (item,) = CASES[8].problem(SMALL, chips_per_host=5, dtype="float64").moves
    assert item.src.mesh.ranks == (0, 1, 2, 5, 6, 7) and item.dst.mesh.ranks == (10, 11, 15, 16, 20, 21)
    assert (item.shape, item.dtype) == (SMALL, "float64")
    with pytest.raises(LayoutError, match="needs 3 chips"):
        CASES[8].problem(chips_per_host=2)


# --- figure 5 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", RECEIVING_HOSTS)
def test_a_broadcast_is_a_chain_of_chunks(study: AlpaCommStudy, hosts: int) -> None:
    run = study.one_to_many(BROADCAST, hosts, GPUS_PER_HOST)
    t = 2**30 / 1.25e9
    chain = t * (run.chunks + hosts - 1) / run.chunks
    assert study.closed_form(BROADCAST, hosts, GPUS_PER_HOST) == pytest.approx(chain)
    assert run.seconds == pytest.approx(chain, rel=1e-3)  # the chains inside hosts
    assert study.bound_s(hosts, GPUS_PER_HOST) == pytest.approx(t) == run.bound_s


def test_formulas_of_the_rivals(study: AlpaCommStudy) -> None:
    for hosts in RECEIVING_HOSTS:
        for strategy, most in ((SEND_RECV, 1e-9), (LOCAL, 0.006)):
            seconds = study.one_to_many(strategy, hosts, GPUS_PER_HOST).seconds
            assert seconds == pytest.approx(study.closed_form(strategy, hosts, GPUS_PER_HOST), rel=most)
        gather = study.one_to_many(ALL_GATHER, hosts, GPUS_PER_HOST)
        assert gather.seconds >= study.closed_form(ALL_GATHER, hosts, GPUS_PER_HOST) * (1 - 1e-9)
    assert study.closed_form(ALL_GATHER, 2, 2) == pytest.approx(study.bound_s(2, 2) * (2 - 1 / 4))


# --- figures 6 and 8 ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", mostly_slow(CASES, 5))
def test_the_best_order_reaches_the_bound(study: AlpaCommStudy, number: int) -> None:
    run = study.case(number)
    assert run.bound_s * (1 - 1e-9) <= run.seconds <= 1.03 * run.bound_s
    for order in orders():
        assert study.over_best(number, order) >= 1 - 1e-3


@pytest.mark.parametrize("number", paper.REORDERED)
def test_two_senders_limit_what_an_order_wins(study: AlpaCommStudy, number: int) -> None:
    assert study.over_best(number, NAIVE) == pytest.approx(2.0, rel=1e-3)
    assert study.most_by_order(number) == pytest.approx(2.0, rel=1e-3)
    assert 1.4 < study.over_best(number, RIVAL_ORDER) < 2


def test_broadcast_over_a_gather_from_two_senders(study: AlpaCommStudy) -> None:
    assert study.most_by_broadcast(8) == pytest.approx(4 / 3 * 128 / 130, rel=1e-3)
    assert [number for number in CASES if study.uneven(number)] == [8]


# --- rows, figures, findings ----------------------------------------------------------------------


def test_every_row_of_the_file_is_computed() -> None:
    assert [row.id for row in published_rows(paper.PAPER)] == list(paper.OURS)


def test_verdicts(study: AlpaCommStudy) -> None:
    ids = [name for name in paper.OURS if name not in training_rows.OURS]
    verdicts = {(row.id, row.model): row.verdict for row in paper.rows(study, ids)}
    assert verdicts["flat_over_hosts", "broadcast"] == verdicts["none_idle", "largest"] == "holds"
    assert verdicts["alike", "case1"] == verdicts["naive_one_sender", "case2"] == "holds"
    assert {verdicts["reordered", f"case{number}"] for number in paper.REORDERED} == {"differs"}
    assert verdicts["naive_congests", "case7"] == verdicts["uneven_drop", "hosts"] == "differs"
    assert verdicts["most_by_order", "largest"] == "ours alone"


def test_figures(study: AlpaCommStudy) -> None:
    drawn = {figure.number: figure for figure in figures(study, (5, 6, 8))}
    assert list(FIGURES) == [5, 6, 7, 8, 9]
    assert [panel.model for panel in drawn[5].panels] == ["one-host", "hosts"]
    seconds, ratios = drawn[6].panels
    assert seconds.columns == ("case", "send/recv", "all-gather", "broadcast", "bound")
    assert [row[3] for row in ratios.rows] == [1.0] * 9
    assert seconds.rows[2][3] == study.case(3).seconds
    for figure in drawn.values():
        for panel in figure.panels:
            assert picture(figure, panel).startswith("<svg")


def test_findings_are_computed(study: AlpaCommStudy) -> None:
    order, broadcast, why, machine = paper.findings(study)[:4]
    assert "2.0x the bound in cases 3, 4 and 9" in order and "1.5 to 5.0 times" in order
    assert "case 8: 1.3x by the formulas" in broadcast and "only: 8" in why
    assert "no latencies" in machine and "K = 128" in machine


def test_without_or_tools(monkeypatch: pytest.MonkeyPatch, study: AlpaCommStudy) -> None:
    monkeypatch.setattr(alpacomm_study, "find_spec", lambda name: None)
    assert EXACT not in orders() and OWN_ORDER in orders()
    (row,) = paper.rows(study, ["optimal"])
    assert row.verdict == "not reproduced" and "OR-tools" in row.remark
    (figure,) = figures(study, [8])
    assert "optimum" not in figure.panels[0].columns and "left out" in figure.panels[0].notes[-1]
    assert "OR-tools" in paper.findings(study)[-1]


@pytest.mark.parametrize("name", ["h100-node", "dgx-a100"])  # no hosts; eight NICs
def test_other_networks_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="hosts of 4 chips at least with one NIC"):
        AlpaCommStudy(load_cluster(name))


def test_command(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    study: AlpaCommStudy,
) -> None:
    monkeypatch.setattr(papers, "AlpaCommStudy", lambda cluster, rivals: study)  # it knows the times already
    args = ["reproduce", "alpacomm", "--rows", "flat_over_hosts", "--figures", "8", "--json"]
    assert run_app([*args, "--out", str(tmp_path), "--report", str(tmp_path / "a.html")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["paper"] == "alpacomm" and data["cluster"]["name"] == "p3.8xlarge"
    assert data["rows"][0]["verdict"] == "holds" and data["figures"][0]["figure"] == 8
    (finding, *_) = data["findings"]
    for name in ("a.html", "alpacomm-p3.8xlarge.md"):
        assert finding in (tmp_path / name).read_text().replace("&#x27;", "'")
    assert (tmp_path / "alpacomm-p3.8xlarge-figure-8-ratios.svg").exists()
    assert run_app(["reproduce", "alpacomm", "--figures", "10"]) == 2
    assert "figures: 5, 6, 7, 8, 9" in capsys.readouterr().err
