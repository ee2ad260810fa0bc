"""Algorithms of an installed package show up everywhere, nothing else changed: it is really installed, by pip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from seam.feature_scale import FeatureScale, FeatureScaleRecord, scaled

from meshweave.algorithms.block import BlockProblem, nodes
from meshweave.algorithms.block.folds import functions_of
from meshweave.base.errors import UnsupportedError

SEAM = Path(__file__).parent / "seam"
POINTS = {
    "collective_a2a": "collective_all_to_all:ENTRY",
    "one_in_flight": "one_in_flight:ENTRY",
    "twin_product": "trial_families:PRODUCT",
    "twin_fused": "trial_families:FUSED",
    "twin_strategy": "trial_families:STRATEGY",
}
NODES = "group_norm = group_norm:RECORD\nfeature_scale = feature_scale:RECORD"
SCHEDULE, STRATEGY, PRODUCT = "one_in_flight", "twin_strategy", "twin_product"


def wheel(folder: Path, points: dict[str, str], modules: list[Path]) -> Path:
    """Write a wheel of modules that offers these algorithms."""
    path, info = folder / "trials-1.0-py3-none-any.whl", "trials-1.0.dist-info"
    lines = "\n".join(f"{name} = {value}" for name, value in points.items())
    with zipfile.ZipFile(path, "w") as archive:
        for module in modules:
            archive.write(module, module.name)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: trials\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        points = f"[meshweave.algorithms]\n{lines}\n[meshweave.nodes]\n{NODES}\n"
        archive.writestr(f"{info}/entry_points.txt", points)
        archive.writestr(f"{info}/RECORD", "")
    return path


def install(folder: Path, points: dict[str, str], modules: list[Path]) -> Path:
    """Install a package into a folder by pip, and return the folder."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run(
        [*pip, "--target", folder / "site", wheel(folder, points, modules)], check=True, timeout=60
    )
    return folder / "site"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield install(tmp_path_factory.mktemp("trials"), POINTS, sorted(SEAM.glob("*.py")))


def python(site: Path, *words: str, status: int = 0) -> str:
    """Run Python with the package beside meshweave; return what it prints, or the error where it must fail."""
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == status, ran.stdout + ran.stderr
    return ran.stderr if status else ran.stdout


@pytest.mark.parametrize("path", sorted(SEAM.glob("*.py")), ids=lambda path: path.name)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= (150 if "LayerNode" in path.read_text() else 80)


def test_a_node_of_the_package_is_written_by_every_kind_of_strategy(site: Path) -> None:
    meshes = {
        "megatron_sp": (3, 1),
        "atp": (2, 2),
        "ring_attention": (2, 1),
        "zero3": (2, 1),
        "summa_block": (2, 2),
    }
    for module in ("group_norm", "feature_scale"):
        python(site, "-c", f"from {module} import run\nfor case in {meshes}.items(): run(*case)")


def test_the_module_of_a_family_can_be_imported_first(site: Path) -> None:
    """The package imports meshweave's families, whichever of them is being imported when it is read."""
    for first in ("matmul2d", "block.products"):
        code = f"import meshweave.algorithms.{first}, meshweave as mw; print(*mw.algorithms.ALGORITHMS)"
        assert set(POINTS) <= set(python(site, "-c", code).split())
    assert set(POINTS) <= set(
        python(site, "-c", "import trial_families, meshweave as mw; print(*mw.algorithms.ALGORITHMS)").split()
    )


def test_the_properties_of_the_table_hold(site: Path) -> None:
    chosen = " or ".join(POINTS)
    files = [str(Path(__file__).parent / name) for name in ("test_contract.py", "test_table.py")]
    printed = python(
        site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files, "-k", chosen
    )
    assert " passed" in printed
    passed = int(printed.rpartition(" passed")[0].rpartition("\n")[2].split()[-1])
    assert passed > 10 * len(POINTS)


VERBS = f"""
import contextlib, io, json
from meshweave.cli.app import run_app
for name in {[SCHEDULE, STRATEGY, PRODUCT]}:
    for verb, *more in (["show"], ["verify"], ["simulate", "--cluster", "dgx-h100:8"]):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert run_app([verb, name, *more, "--json"]) == 0, (verb, name)
        assert json.loads(printed.getvalue()), (verb, name)
"""


def test_command_line_knows_them(site: Path) -> None:
    python(site, "-c", VERBS)


PLANS = f"""
import meshweave as mw
options = mw.tune.SpaceOptions()
assert "{SCHEDULE}" in options.schedules and "{STRATEGY}" in options.strategies, options
on = dict(model="llama-2-7b", cluster="dgx-h100:8", batch=16, sequence=1024)
twin = mw.plan(**on, tp=2, pp=2, strategy="{STRATEGY}", schedule=["1f1b", "{SCHEDULE}"], micro_batch=1)
plain = mw.plan(**on, tp=2, pp=2, strategy="megatron", schedule="1f1b", micro_batch=1)
assert twin.step.best.step_s == plain.step.best.step_s, (twin.step.best, plain.step.best)
late = mw.plan(**on, tp=2, pp=2, schedule="{SCHEDULE}", micro_batch=1)
assert late.step.best.degrees.schedule == "{SCHEDULE}" and late.step.best.step_s > plain.step.best.step_s
from meshweave.tune.fused import fused_choices
from meshweave.algorithms.table import algorithm
problem = next(algorithm("twin_fused").examples())
assert "twin_fused" in {{choice.algorithm for choice in fused_choices(problem, mw.load_cluster("dgx-h100:8"))}}
"""


def test_plans_choose_among_them(site: Path) -> None:
    python(site, "-c", PLANS)


def test_plan_ranks_the_product(site: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    words = ["plan", "gpt3", "--products", "--cluster", "tpu-v4-pod:16", "--out", str(plan)]
    python(site, "-m", "meshweave", *words, "--algorithms", f"collective,{PRODUCT}")
    candidates = json.loads(plan.read_text())["candidates"]
    assert {candidate["algorithm"] for candidate in candidates} == {"collective", PRODUCT}
    python(site, "-m", "meshweave", "simulate", str(plan), "--layer", "ff1", "--algorithm", PRODUCT, "--json")


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ({"bad": "no_such_module:ENTRY"}, "entry point bad = no_such_module:ENTRY cannot be loaded"),
        ({"bad": "trial_families:TwinProduct"}, "is not an instance of Algorithm"),
        (
            {"a": "trial_families:PRODUCT", "b": "trial_families:PRODUCT"},
            "two algorithms are called 'twin_product'",
        ),
    ],
)
def test_a_wrong_entry_point_is_one_line(tmp_path: Path, points: dict[str, str], said: str) -> None:
    with zipfile.ZipFile(wheel(tmp_path, points, [SEAM / "trial_families.py"])) as archive:
        archive.extractall(tmp_path / "site")  # what pip does with it, in a second less
    error = python(tmp_path / "site", "-m", "meshweave", "show", "collective", status=2)
    assert said in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("fn", ["activation", "loss"])
def test_a_node_whose_functions_have_names_of_others_is_refused(
    fn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = BlockProblem(2, 4, 8, 4, 2, 2, 8, (2, 1), exact=True)
    graph = scaled(problem.layer)
    record = type("Record", (FeatureScaleRecord,), {"fn": fn})()
    known = {**nodes._table(), FeatureScale: record}
    monkeypatch.setattr(nodes, "_table", lambda: known)
    with pytest.raises(UnsupportedError, match=f"calls a function '{fn}'"):
        functions_of(replace(problem, graph=graph))


def test_a_second_record_of_a_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of two would win follows from the order in which packages were installed."""
    monkeypatch.setattr(nodes, "installed", lambda *_: (FeatureScaleRecord(), FeatureScaleRecord()))
    with pytest.raises(UnsupportedError, match="two records are of FeatureScale"):
        nodes._table.__wrapped__()
