"""Seeded faults: a wrong sub-program is refused at its definition, an include that misfits where it stands."""

from __future__ import annotations

from dataclasses import replace

import pytest
from including import golden_include, text_of

from meshweave.base.errors import ProgramError
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.parse import parse
from meshweave.ir.program.statements import rewrite

TWO = """program("two messages")
def step():
    program("rank 0 sends to rank 1")
    pair = mesh((2,), ("x",))
    A = tensor((2, 2), "float32")
    B = tensor((2, 2), "float32")
    a = input(A, pair[S(0)])
    b = output(B, pair[S(0)])
    net = lane()
    own = lane()
    with pair:
        copy(b, a, lane=own)
    with ranks(0):
        send(a, peer=1, lane=net)
    with ranks(1):
        recv(b, peer=0, lane=net)
pair = mesh((2,), ("x",))
A = tensor((2, 2), "float32")
B = tensor((2, 2), "float32")
x = input(A, pair[S(0)])
y = output(B, pair[S(0)])
z = scratch((1, 2), "float32", on=pair)
net = lane()
"""


def fault(text: str) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        validate(parse(text))
    return caught.value


def changed(name: str, old: str, new: str) -> ProgramError:
    """The fault of a golden program in which `old`, which it has once, reads `new`."""
    text = text_of(name)
    assert text.count(old) == 1, text.count(old)
    return fault(text.replace(old, new))


# --- definitions ----------------------------------------------------------------------------------------


def test_wrong_sub_program_is_refused_at_its_definition() -> None:
    error = changed("pipeline", 'all_reduce(y, part, over="tp.x", lane=comm)', "copy(y, part, lane=comm)")
    assert error.message.startswith("block: Y[0, 0] lacks k = ") and error.op == "copy 0.3"


def test_sub_program_that_deadlocks_is_refused_at_its_definition() -> None:
    text = TWO.replace(
        "send(a, peer=1, lane=net)", "recv(b, peer=1, lane=net)\n        send(a, peer=1, lane=net)"
    )
    text = text.replace(
        "recv(b, peer=0, lane=net)\n", "recv(b, peer=0, lane=net)\n        send(a, peer=0, lane=net)\n"
    )
    error = fault(text + "include(step, pair=pair, a=x, b=y)\n")
    assert error.message.startswith("step: deadlock: ")


def test_recursion_is_refused() -> None:
    text = TWO.replace("        copy(b, a, lane=own)", "        include(step, pair=pair, a=a, b=b)")
    error = fault(text + "include(step, pair=pair, a=x, b=y)\n")
    assert "line 12" in error.message and "'step' includes itself: step > step" in error.message
    later = text.replace("include(step, pair=pair, a=a", "include(other, pair=pair, a=a")
    assert "'other' is no program that is defined above" in fault(later).message


def test_index_may_shape_nothing() -> None:
    for old, new in (("peer=1, lane=net", "peer=1, tag=m, lane=net"), ("    with ranks(0):", "    if m:")):
        text = TWO.replace(old, new).replace("    own = lane()\n", "    own = lane()\n    m = index()\n")
        error = fault(text + "include(step, pair=pair, a=x, b=y, m=3)\n")
        assert error.message.startswith("step: index 'm' may stand in the args of calls only")


def test_definitions_are_used_and_not_nested() -> None:
    assert "'step' is defined and never included" in fault(TWO).message
    definition = TWO[TWO.index("def step") : TWO.index("\npair = mesh") + 1]
    assert "'step' is defined twice" in fault(TWO.replace(definition, definition * 2)).message
    inside = TWO.replace("    pair = mesh", "    def other():\n        pass\n    pair = mesh", 1)
    assert "'other' is defined inside of step" in fault(inside).message
    assert "without arguments" in fault(TWO.replace("def step():", "def step(x):")).message


def test_one_name_is_one_program() -> None:
    program = golden_include("pipeline")
    first, second = program.includes

    def other(op: object) -> tuple[object]:
        return (replace(second, program=replace(second.program, name="other")) if op is second else op,)

    with pytest.raises(ProgramError, match="'block' names two different programs"):
        validate(replace(program, body=rewrite(program.body, other)))  # type: ignore[arg-type]
    assert first.program is second.program


# --- views ----------------------------------------------------------------------------------------------


def test_tensor_of_the_wrong_shape() -> None:
    error = changed("pipeline", "w1=w1, w2=v1", "w1=v1, w2=v1")
    assert error.message == "stage 1 > block: w1 has shape (4, 3) on rank 0, v1[:3, :4] has (3, 4)"
    assert (error.rank, error.buffer) == (2, "v1")


def test_region_out_of_range() -> None:
    error = changed("pipeline", "y=y[2 * m:2 * m + 2, :]", "y=y[2 * m + 2:2 * m + 4, :]")
    assert "selects [8, 10) of a dim of size 8" in error.message
    assert error.op == "stage 1 > block 0.3.3" and error.buffer == "y"


def test_ranks_outside_the_mesh() -> None:
    error = changed("pipeline", "tp=grid[1, :]", "tp=grid[2, :]")
    assert error.message == "stage 1 > block: grid[2, :] has coordinate 2 on grid.stage, which has 0 to 1"
    error = changed("pipeline", "tp=grid[1, :]", "tp=grid[1, 1:3]")
    assert error.message == "stage 1 > block: grid[1, 1:3] takes [1, 3) of the 2 ranks of grid.tp"
    error = changed("pipeline", "tp=grid[1, :]", "tp=grid")
    assert error.message == "stage 1 > block: mesh tp has shape (2,), grid has (2, 2)"


def test_two_meshes_on_one_rank() -> None:
    text = TWO.replace(
        '    pair = mesh((2,), ("x",))\n', '    pair = mesh((2,), ("x",))\n    all = mesh((2,), ("y",))\n'
    )
    error = fault(
        text + "include(step, pair=pair, all=transpose(pair[:], 0), a=x, b=y)\n".replace("[:]", "[0:1]")
    )
    assert error.message == "step: mesh all has shape (2,), transpose(pair[:1], 0) has (1,)"
    assert "is given nothing for mesh 'all'" in fault(text + "include(step, pair=pair, a=x, b=y)\n").message


def test_output_given_twice() -> None:
    error = fault(TWO + "include(step, pair=pair, a=y, b=y)\n")
    assert error.message == "step: a and b would share elements of y, and one is an output"
    assert error.op == "step 0"


def test_output_included_twice() -> None:
    error = changed("pipeline", "y=y[2 * m:2 * m + 2, :]", "y=y[0:2, :]")
    assert error.message.startswith(
        "stage 1 > block: writes y[:2, :4], which stage 1 > block 0.0.3 wrote and nothing"
    )


def test_input_never_written() -> None:
    error = fault(TWO + "include(step, pair=pair, a=z, b=y)\n")
    assert error.message.startswith("step: reads what was never written, first at (0, 0) of the view")
    assert error.buffer == "z" and error.op == "step 0"


def test_micro_batch_doubled_and_skipped() -> None:
    error = changed("pipeline", "x=x[2 * m:2 * m + 2, :]", "x=x[0:2, :]")
    assert error.message.startswith("Y1[2, 0] holds another element of Y1")


def test_operands_of_another_product() -> None:
    error = changed("feed_forward", "a=h_t, b=w2", "a=h_t, b=w1_t").message
    assert "'w1_t' is no buffer" in error
    error = changed("feed_forward", "a=x, b=w1, c=h", "a=w1, b=x, c=h").message
    assert error == "up > product: multiplies W1 by X, which no declared product does"


def test_another_orientation() -> None:
    error = changed(
        "feed_forward", "include(turn, g=grid, a=h, b=h_t)\n", "with grid:\n    copy(h_t, h, lane=move)\n"
    )
    assert "'move' is no lane" in error.message
    text = text_of("feed_forward").replace("include(turn, g=grid, a=h, b=h_t)", "copy(h_t, h, lane=move)")
    text = text.replace("\ngrid = mesh", "\nmove = lane()\ngrid = mesh").replace(
        "\ninclude(product", "\ninclude(product", 1
    )
    start, end = text.index("def turn"), text.index("move = lane")
    error = fault(text[:start] + text[end:])
    assert error.message.startswith("down > product: multiplies something that is no block of H")


def test_replicas_must_agree() -> None:
    text = text_of("pipeline").replace(
        "\ny = output", '\nodd = scratch((2, 4), "float32", on=s1)\ny = output'
    )
    copies = """    with s1:
        copy(odd, inbox(m % 2), lane=forward)
        if s1.tp == 1:
            copy(odd, inbox(0), lane=forward)
    include(block, tp=grid[1, :], x=odd"""
    error = fault(text.replace("    include(block, tp=grid[1, :], x=inbox(m % 2)", copies))
    assert error.message.startswith("stage 1 > block: x has other elements of X here than on another rank")


# --- names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("a=x", "q=x", "'step' has no 'q' to be given"),
        ("a=x", "a=x, a=x", "'step' is given 'a' twice"),
        ("a=x, ", "", "step: is given nothing for buffer 'a'"),
        ("step,", "stop,", "'stop' is no program that is defined above (did you mean 'step'?)"),
        ("a=x", "a=q", "'q' is no buffer"),
        ("b=y", "b=y, net=q", "'q' is no lane"),
        ("b=y", 'b=y, stashes=(("q", "r"),)', "step: has no stash 'q' to be given"),
        ("b=y", "b=y, copies=0", "step: has 0 copies of its scratch"),
        ("pair=pair", "pair=q", "'q' is no mesh"),
        ("a=x", "a=at(0, x)", "stands for a, and is memory of another rank"),
        ("a=x", "a=x[blocked(0, 1, 2), :]", "stands for a, and is no box"),
    ],
)
def test_names_that_do_not_fit(old: str, new: str, message: str) -> None:
    text = "include(step, pair=pair, a=x, b=y)\n"
    assert message in fault(TWO + text.replace(old, new)).message


def test_dtype_and_dims_must_fit() -> None:
    error = fault(
        TWO.replace('"float32", on=pair', '"int32", on=pair') + "include(step, pair=pair, a=z, b=y)\n"
    )
    assert error.message == "step: a is float32, z is int32"
    flat = TWO.replace('scratch((1, 2), "float32"', 'scratch((2,), "float32"')
    assert (
        fault(flat + "include(step, pair=pair, a=z, b=y)\n").message
        == "step: a has 2 dims, z has 1, z names 1"
    )


# --- order ----------------------------------------------------------------------------------------------

CROSSING = """with ranks(0):
    send(x, peer=1, lane=net)
include(step, pair=pair, a=x, b=y{lane})
with ranks(1):
    recv(z, peer=0, lane=net)
"""


def test_signal_crossing() -> None:
    """Rank 0 sends its own message first, rank 1 takes that of the sub-program first, in one lane."""
    error = fault(TWO + CROSSING.replace("{lane}", ", net=net"))
    assert error.message.startswith(
        "step: signals cross in lane net, tag 0: rank 0 issues send 0.0 where rank 1 issues step 1"
    )
    assert (error.op, error.rank) == ("step 1", 1)
    validate(parse(TWO + CROSSING.replace("{lane}", "")))


def test_ranks_that_disagree_on_an_include() -> None:
    error = fault(TWO + "if pair.x == 0:\n    include(step, pair=pair, a=x, b=y)\n")
    assert "rank 1 never joins this collective" in error.message and error.op == "step 0.0"


def test_deadlock_around_includes_is_that_of_the_expanded_program() -> None:
    """Each rank waits for the other in a lane that the include shares: no order exists."""
    text = """with ranks(0):
    recv(z, peer=1, tag=7, lane=net)
include(step, pair=pair, a=x, b=y, net=net)
with ranks(1):
    send(y, peer=0, tag=7, lane=net)
"""
    error = fault(TWO + text)
    assert error.message.startswith("deadlock: recv 0.0 of rank 0 waits for")
    assert "step > " in error.message


def test_region_of_a_buffer_that_others_reach() -> None:
    text = TWO.replace("        send(a, peer=1, lane=net)", "        get(b, at(1, a), lane=net)")
    text = text.replace("    with ranks(1):\n        recv(b, peer=0, lane=net)\n", "")
    wide = text.replace("z = scratch((1, 2)", "z = scratch((2, 2)")
    program = parse(wide + "include(step, pair=pair, a=z[pair.x:pair.x + 1, :], b=y)\n")
    with pytest.raises(ProgramError, match=r"^step: a is reached from other ranks, .* it depends on pair\.x"):
        assert program.expanded is None
