"""What notebooks show: well-formed HTML with inline styles that loads nothing, of any size of object."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from itertools import islice
from typing import Any

import pytest

import meshweave as mw
from meshweave import notebook
from meshweave.report.program_picture import draw_program

VOID = {"br", "hr", "img", "input", "meta"}


class Nesting(HTMLParser):
    """Tags that are open; each is closed by its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def shown(value: Any) -> str:
    html: str = value._repr_html_()
    nesting = Nesting()
    nesting.feed(html)
    assert not nesting.open
    assert not re.search(r"<script|<style|<link|https?://(?!www\.w3\.org)|\bnan\b|class=", html)
    return html


@cache
def run() -> mw.simulation.Simulation:
    problem = mw.algorithms.Matmul2dProblem(1024, 1024, 1024, (2, 2), "os", dtype="bfloat16")
    cluster = mw.load_cluster("tpu-v4-pod:4")
    program = mw.rank(problem, cluster, algorithms=["meshslice"])[0].program
    return mw.simulate(program, mw.Machine.of(cluster, program))


def test_a_step_shows_its_time_and_memory_in_parts() -> None:
    step = mw.step("llama-2-7b", "dgx-h100:16", batch=32, sequence=2048, tp=2, pp=2, zero=1)
    html = shown(step)
    assert "dp 4 pp 2 tp 2" in html and "computing" in html and "activations" in html
    bars = [float(width) for width in re.findall(r"width:([\d.]+)px;background:#(?!e9edf2)", html)]
    of_time, memory = 420, 420 * step.memory.total / step.problem.cluster.chip.memory_bytes
    assert sum(bars) == pytest.approx(of_time + memory, rel=0.01)


def test_a_step_shows_how_its_layers_lie_and_what_they_move() -> None:
    step = mw.step("llama-2-7b", "dgx-h100:16", batch=32, sequence=2048, tp=4, cp=2, zero=1)
    html = shown(step)
    assert "a layer by megatron_sp on depth 2 x row 4" in html and "1/4 a rank" in html
    assert html.count("all_gather along row, 4 ranks: 8.39 MB") == 2 and "in it: permute along depth" in html
    alone = shown(mw.step("llama-2-7b", "dgx-h100:16", batch=32, sequence=2048, zero=3))
    assert "a layer by megatron_sp on one rank" in alone and "nothing moves" in alone
    routed = shown(mw.step("deepseek-v3", "dgx-h100:64", batch=64, sequence=2048, ep=8, tp=2))
    assert len(re.findall(r'"14">\d+ % of the layers by', routed)) == 2 and "in it: dispatch" in routed


def test_a_plan_of_a_step_shows_its_ranking_and_one_of_products_its_algorithms() -> None:
    plan = mw.plan("llama-2-7b", "dgx-h100:8", batch=16, sequence=2048, strategy="megatron_sp", cp=1)
    html = shown(plan)
    assert html.count("<tr>") == 1 + min(notebook.NUM_ROWS, len(plan.step.ranked))
    assert f"{100 * plan.step.best.mfu:.1f} %" in html
    products = mw.tune.plan_model(
        mw.load_model("gpt3"), mw.load_cluster("tpu-v4-pod:16"), mw.Workload(8, 2048)
    )
    assert products.best.algorithm in shown(products)


@pytest.mark.parametrize("model", mw.models())
def test_a_layer_shows_each_node_and_weight(model: str) -> None:
    loaded = mw.load_model(model)
    for layer in {loaded.layer, *(layer for _, layer in loaded.layers or ())}:
        html = shown(layer)
        for node in layer.nodes:
            assert f"{type(node).__name__} of {', '.join(node.ins)} makes {node.out}" in html
            assert all(weight.name in html for weight in node.parameters)
        assert html.count("reduce_scatter, 4 ranks") >= 1 and "by megatron_sp on 4 ranks" in html


@pytest.mark.parametrize("name", sorted(mw.algorithms.ALGORITHMS))
def test_programs_of_every_entry_are_shown(name: str) -> None:
    entry = mw.algorithm(name)
    for problem in islice(entry.examples(), 2):
        program = entry.program(problem, next(iter(entry.candidates(problem))))
        html = shown(program)
        assert "op by op" in html and len(html) < 400_000


def test_shards_and_moves_of_a_program() -> None:
    html = shown(run().program)
    assert all(f"a: ranks {rank}<" in html for rank in range(4))
    assert "gather_a (all_gather) among ranks 0,1, writes a_g" in html


def test_a_run_and_its_trace_show_lanes_of_the_first_ranks() -> None:
    for value in (run(), run().trace()):
        assert "rank 0" in shown(value) and "rank 3" in shown(value)
    assert "0 ranks" in shown(mw.Trace("empty", "numpy", ()))
    assert "between rows" in shown(run().trace())


def test_large_runs_are_shown_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "MAX_OPS", 2)
    for value in (run(), run().trace()):
        html = shown(value)
        assert "<svg" not in html and "4 ranks" in html


def test_long_texts_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "MAX_TEXT", 100)
    assert "characters more" in shown(run().program)


def test_a_terminal_has_a_line_for_what_a_notebook_draws() -> None:
    simulated, trace = run(), run().trace()
    per_rank, time = simulated.num_ops // 4, r"[\d.]+ us>"
    assert repr(simulated.program) == (
        f"<Program {simulated.program.name}: 4 ranks, {len(list(simulated.program.ops()))} ops as written>"
    )
    assert re.fullmatch(f"<Simulation of meshslice: 4 ranks, {4 * per_rank} ops, {time}", repr(simulated))
    assert re.fullmatch(
        f"<Trace of meshslice by simulate: 4 ranks, {4 * per_rank} spans, {time}", repr(trace)
    )
    plan = mw.plan(
        "llama-3-8b", "dgx-h100:8", batch=8, sequence=4096, strategy="megatron_sp", stack="torchtitan"
    )
    titan = mw.export(plan, "torchtitan")
    assert str(titan) == titan.text and re.fullmatch(
        r"<Export to torchtitan: \d+ lines, \d+ left out>", repr(titan)
    )


def test_a_program_shows_what_it_sends_and_puts() -> None:
    program = mw.parse("""
program("three ways")
pair = mesh((2,), ("x",))
a = scratch((4,), "float32", on=pair)
b = scratch((4,), "float32", on=pair)
net = lane()
with ranks(0):
    send(a, peer=1, lane=net)
    put(at(1, b), a, lane=net)
with ranks(1):
    recv(a, peer=0, lane=net)
""")
    text = draw_program(program, 0)
    assert "1 x send with rank 1, 16 B in all" in text and "1 x put with rank 1, 16 B in all" in text
    assert "1 x recv with rank 0, writes a, 16 B in all" in draw_program(program, 1)
