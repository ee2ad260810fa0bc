"""Two algorithms of under 80 lines, added as CONTRIBUTING says: they show up everywhere, nothing else changed."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import test_contract as relations

from meshweave.algorithms import contract, matmul2d
from meshweave.algorithms import table as tables
from meshweave.algorithms.contract import Algorithm
from meshweave.base.errors import UnsupportedError
from meshweave.cli.app import run_app

SEAM = Path(__file__).parent / "seam"
PRODUCT, PIPELINE = "collective_a2a", "one_in_flight"
POINTS = {PRODUCT: "collective_all_to_all:CollectiveAllToAll", PIPELINE: "one_in_flight:OneInFlight"}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Algorithm]]:
    """Both trial algorithms as if a package with entry points had been installed."""
    monkeypatch.syspath_prepend(str(SEAM))
    instances = {}
    for name, value in POINTS.items():
        module, _, attribute = value.partition(":")
        instances[name] = getattr(importlib.import_module(module), attribute)()
        monkeypatch.setattr(sys.modules[module], "ENTRY", instances[name], raising=False)
    points = [
        EntryPoint(name, f"{value.partition(':')[0]}:ENTRY", contract.ENTRY_POINTS)
        for name, value in POINTS.items()
    ]
    monkeypatch.setattr(contract, "entry_points", lambda group: points)
    contract._installed.cache_clear()
    for kind, entries in ((matmul2d.Matmul2d, matmul2d.ALGORITHMS), (Algorithm, tables.ALGORITHMS)):
        for name, entry in contract.algorithm_table(kind).items():
            monkeypatch.setitem(entries, name, entry)
    yield instances
    contract._installed.cache_clear()


@pytest.mark.parametrize("name", POINTS)
def test_files_are_short(name: str) -> None:
    path = SEAM / f"{POINTS[name].partition(':')[0]}.py"
    assert len(path.read_text().splitlines()) <= 80


@pytest.mark.parametrize("name", POINTS)
def test_contract_holds(name: str, installed: dict[str, Algorithm]) -> None:
    entry = installed[name]
    assert tables.algorithm(name) is entry
    for problem in entry.examples():
        assert tables.algorithms_for(problem)[name] is entry
        relations.test_placements_are_those_of_the_buffers(entry, problem)
        for config in entry.candidates(problem):
            relations.test_program_is_sound_and_computes_the_reference_in_any_order(entry, problem, config)
            relations.test_closed_forms_equal_what_the_program_does(entry, problem, config)
            relations.test_estimate_is_the_uncontended_simulation(entry, problem, config)


@pytest.mark.parametrize("name", POINTS)
@pytest.mark.parametrize(
    "command",
    [
        ["show", "NAME", "--json"],
        ["verify", "NAME", "--json"],
        ["simulate", "NAME", "--cluster", "dgx-h100:8", "--json"],
        ["tune", "algorithm", "NAME", "--cluster", "dgx-h100:8", "--json"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_command_line_knows_them(capsys: pytest.CaptureFixture[str], name: str, command: list[str]) -> None:
    assert run_app([name if word == "NAME" else word for word in command]) == 0
    assert json.loads(capsys.readouterr().out)


def test_plan_ranks_the_product(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    names = ["--algorithms", f"collective,{PRODUCT}"]
    assert (
        run_app(["plan", "gpt3", "--products", "--cluster", "tpu-v4-pod:16", "--out", str(plan), *names]) == 0
    )
    assert {candidate["algorithm"] for candidate in json.loads(plan.read_text())["candidates"]} == {
        "collective",
        PRODUCT,
    }
    capsys.readouterr()
    assert run_app(["simulate", str(plan), "--layer", "ff1", "--algorithm", PRODUCT, "--json"]) == 0
    assert PRODUCT in capsys.readouterr().out or "all-to-all" in capsys.readouterr().out


def test_a_broken_entry_point_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("bad", "no_such_module:ENTRY", contract.ENTRY_POINTS)]
    monkeypatch.setattr(contract, "entry_points", lambda group: points)
    contract._installed.cache_clear()
    with pytest.raises(UnsupportedError, match="entry point bad = no_such_module:ENTRY cannot be loaded"):
        contract.algorithm_table(Algorithm)


def test_a_name_can_be_taken_only_once(installed: dict[str, Algorithm]) -> None:
    with pytest.raises(UnsupportedError, match="two algorithms are called 'one_in_flight'"):
        contract.algorithm_table(Algorithm, installed[PIPELINE])
