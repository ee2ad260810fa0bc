"""The source of jax functions: what it reads like, and that it stands alone. None of this needs jax."""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
from dataclasses import replace

import pytest

import meshweave as mw
from meshweave.algorithms.fused import Tiles
from meshweave.execute.jax.source import jax_source
from meshweave.ir.program import Repeat, Var, When
from meshweave.ir.program.expressions import Binary


def product_source(
    name: str = "meshslice", mesh: tuple[int, ...] = (2, 4), sizes=(64, 64, 64), **options
) -> str:
    rings = options.pop("rings", 0)
    problem = mw.algorithms.Matmul2dProblem(*sizes, mesh, dtype=options.pop("dtype", "float32"))
    program = mw.algorithm(name).program(problem, mw.algorithms.Matmul2dConfig((1,) * 4, 4))
    return jax_source(mw.lower.lower_rings(program, rings) if rings else program, **options)


def body_of(source: str) -> list[str]:
    inside = source[source.index("def on_device") : source.index("def on_mesh")]
    return [line.strip() for line in inside.splitlines()[2:] if line.strip()]


def test_an_op_is_a_line_and_a_loop_a_loop() -> None:
    assert body_of(product_source()) == [
        "a_s = [None] * 4",
        "a_g = [None] * 4",
        "b_s = [None] * 4",
        "b_g = [None] * 4",
        "for s in range(4):",
        "a_s[s % 4] = blocks(a, 1, s * 4, 4, 16)",
        'a_g[s % 4] = gather(a_s[s % 4], "col", 1)',
        "b_s[s % 4] = blocks(b, 0, s * 4, 4, 16)",
        'b_g[s % 4] = lax.all_gather(b_s[s % 4], "row", axis=0, tiled=True)',
        "c = product(a_g[s % 4], b_g[s % 4], c if s > 0 else None)",
        "return (c,)",
    ]


def test_a_condition_on_loop_indices_is_no_array() -> None:
    """Traced, an array is neither true nor false. A table of 64 turns is longer than the condition."""
    problem = mw.algorithms.Matmul2dProblem(8, 8, 1024, (2, 2))
    program = mw.algorithm("meshslice").program(problem, mw.algorithms.Matmul2dConfig((1,) * 64, 4))
    (on,) = program.body
    (loop,) = (each for each in on.body if isinstance(each, Repeat))
    s, last = Var(loop.var), loop.count - 1
    inside = Binary("and", Binary(">", s, 0), Binary("<", s, last))
    guarded = replace(loop, body=(When(inside, loop.body),))
    body = tuple(guarded if each is loop else each for each in on.body)
    lines = body_of(jax_source(replace(program, body=(replace(on, body=body),))))
    assert loop.count == 64 and f"if bool(s > 0) and bool(s < {last}):" in lines


def test_a_rolled_loop_has_variables_in_place_of_slots() -> None:
    lines = body_of(product_source(loops="rolled"))
    begin = lines.index("def turn_s(s: Array, carried: tuple[Array, ...]) -> tuple[Array, ...]:")
    assert lines[begin + 1 :] == [
        "(c,) = carried",
        "a_s = blocks(a, 1, s * 4, 4, 16)",
        'a_g = gather(a_s, "col", 1)',
        "b_s = blocks(b, 0, s * 4, 4, 16)",
        'b_g = lax.all_gather(b_s, "row", axis=0, tiled=True)',
        "c = product(a_g, b_g, c)",
        "return (c,)",
        "(c,) = lax.fori_loop(1, 4, turn_s, (c,))",
        "return (c,)",
    ]


def test_a_loop_whose_slots_pass_from_turn_to_turn_stays_unrolled() -> None:
    assert product_source("cannon", mesh=(2, 2), loops="rolled") == product_source("cannon", mesh=(2, 2))


def test_the_ring_sends_pieces_as_they_came() -> None:
    lines = body_of(product_source(mesh=(1, 4), rings=1))
    sent = [line.split("shift(")[1].split(",")[0] for line in lines if "shift(" in line]
    assert sent == ["a_g_0", "a_g_1", "a_g_0"] or sent == ["a_g_0", "a_g_1", "a_g_2"]
    assert not any("dynamic_slice" in line for line in lines)


def test_halves_are_summed_in_single_precision() -> None:
    source = product_source(dtype="bfloat16")
    assert body_of(source)[-1] == 'return (c.astype("bfloat16"),)'
    assert "astype" not in "".join(body_of(source)[:-1])


def test_in_order_transfers_wait_for_the_last_product_and_their_lane() -> None:
    lines = body_of(product_source(in_order=True))
    assert "last, arrived, moved = None, [], {}" in lines
    sent = 'gather(after(a_s[s % 4], last, moved.get("col")), "col", 1)'
    assert f'moved["col"] = {sent}' in lines and 'a_g[s % 4] = moved["col"]' in lines
    product = lines.index("c = product(after(a_g[s % 4], *arrived, last), b_g[s % 4], c if s > 0 else None)")
    assert lines[product + 1 :] == ["last = c", "arrived, moved = moved.values(), {}", "return (c,)"]


def test_slots_that_start_as_arrays_share_none() -> None:
    lines = body_of(product_source(mesh=(2, 4), rings=1))
    assert 'a_g = [lax.empty((32, 16), "float32") for _ in range(4)]' in lines


def test_names_of_the_program_do_not_hide_names_of_the_source() -> None:
    text = mw.ir.to_text(
        mw.algorithm("collective").program(
            mw.algorithms.Matmul2dProblem(4, 4, 4, (2, 2)), mw.algorithms.Matmul2dConfig()
        )
    )
    source = jax_source(mw.parse(text.replace("a = input", "lax = input").replace("col, a,", "col, lax,")
                                 .replace("], a, over", "], lax, over")))  # fmt: skip
    assert "def on_device(lax_: Array" in source


def test_strings_of_a_program_stay_strings() -> None:
    text = mw.ir.to_text(
        mw.algorithm("cannon").program(
            mw.algorithms.Matmul2dProblem(4, 4, 4, (2, 2)), mw.algorithms.Matmul2dConfig()
        )
    )
    name = 'x\\"\\"\\"\\nimport os\\n'
    source = jax_source(mw.parse(text.replace('program("cannon")', f'program("{name}")')), ("a b", 'c")('))
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import)]
    assert [alias.name for node in imports for alias in node.names] == ["jax", "jax.numpy"]
    assert '"c\\")("' in source


@pytest.mark.parametrize("name", ["meshslice", "summa"])
def test_the_source_uses_only_names_that_it_defines(name: str) -> None:
    nodes = list(ast.walk(ast.parse(product_source(name, mesh=(2, 2), sizes=(33, 14, 21)))))
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    defined |= {alias.asname or alias.name for node in imports for alias in node.names}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)} | set(dir(builtins))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    defined |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    assert {node.id for node in names} <= defined
    modules = {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    assert modules == {"__future__", "typing", "jax", "jax.sharding"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [("reshard_broadcast", "not along axes of a mesh of all ranks"), ("zbv", "no mesh of program ZB-V")],
)
def test_what_jax_has_no_form_for_is_named(name: str, reason: str) -> None:
    entry = mw.algorithm(name)
    problem = next(iter(entry.examples()))
    with pytest.raises(mw.errors.UnsupportedError, match=reason):
        jax_source(entry.program(problem, next(iter(entry.candidates(problem)))))


def test_messages_of_one_form_are_one_permute() -> None:
    problem = next(iter(mw.algorithm("t3_direct").examples()))
    program = mw.algorithm("t3_direct").program(problem, Tiles(3, 10, "rows"))
    sent = [line for line in body_of(jax_source(program)) if "ppermute" in line]
    pairs = [ast.literal_eval(line[line.index("[(") : line.index(")]") + 2]) for line in sent]
    assert [len(listed) for listed in pairs] == [3, 3, 3, 1, 1, 1]  # the last part of four is shorter


def test_printing_imports_no_jax() -> None:
    code = (
        "import sys; from meshweave.cli.app import app\n"
        "try: app(['show', 'meshslice', '--as', 'jax'])\n"
        "except SystemExit: pass\n"
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "def on_device(a: Array, b: Array)" in done.stdout


@pytest.mark.parametrize(("op", "text"), [("sum", "b.sum(0)"), ("max", "b.max(0)"), ("min", "b.min(0)")])
def test_terms_of_an_output_are_reduced_by_their_op(op: str, text: str) -> None:
    source = jax_source(mw.parse(terms_program(f'P("{op}")')))
    assert f"return {text}\n" in source


def test_terms_of_two_reductions_are_refused() -> None:
    with pytest.raises(mw.errors.UnsupportedError, match="terms for max and sum"):
        jax_source(mw.parse(terms_program('P("max"), P("sum")', '(2, 2), ("x", "y")', "R, R")))


def terms_program(out: str, mesh: str = '(2,), ("x",)', given: str = "R") -> str:
    return f"""
program("terms")
tp = mesh({mesh})
A = tensor((4, 4), "float32")
a = input(A, tp[{given}])
b = output(A, tp[{out}])
compute = lane()
with tp:
    copy(b, a, lane=compute)
"""
