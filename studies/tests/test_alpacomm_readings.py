"""AlpaComm's readings: rivals as Alpa's public code runs them, and the same machine for all strategies."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.reshard import ReshardProblem, TensorMove
from meshweave.base.errors import UnsupportedError
from meshweave.cli.app import run_app
from meshweave.describe.layout import Layout, Replicate, Shard
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.layout.spec import layout_of_spec
from meshweave.describe.machine.cluster import load_cluster
from meshweave.ir.analysis.validate import validate
from meshweave.ir.program.ops import AllGather, Send
from meshweave_studies import papers
from meshweave_studies.alpacomm import rows as paper
from meshweave_studies.alpacomm.alpa import alpa_program, part_layout
from meshweave_studies.alpacomm.cases import CASES
from meshweave_studies.alpacomm.readings import READINGS
from meshweave_studies.alpacomm.study import ALL_GATHER, BROADCAST, SEND_RECV, AlpaCommStudy
from meshweave_studies.published import reading_named
from sampling import examples

SMALL = (24, 16, 8)


@pytest.fixture(scope="module")
def study() -> AlpaCommStudy:
    return AlpaCommStudy(load_cluster("p3.8xlarge"), rivals="public")


@pytest.mark.parametrize("number", CASES)
@pytest.mark.parametrize("gathers", [True, False])
def test_alpa_reshards_every_case(number: int, gathers: bool) -> None:
    validate(alpa_program(CASES[number].problem(SMALL), gathers=gathers))


@pytest.mark.parametrize(
    ("ranks", "rows", "cuts", "copies"),
    [(4, 8, [4], 1), (3, 8, [], 3), (6, 8, [2], 3), (6, 9, [3, 2], 1), (8, 12, [4, 2], 1), (1, 8, [], 1)],
)
def test_parts_are_common_divisors(ranks: int, rows: int, cuts: list[int], copies: int) -> None:
    layout = Layout(Mesh.of("dst", (ranks,), ("x",)), (Replicate(),))
    parts = part_layout(layout, (rows, 10))
    sizes = dict(zip(parts.layout.mesh.axes, parts.layout.mesh.shape, strict=True))
    assert [sizes[cut.axis] for cut in parts.cuts] == cuts
    assert ranks // math.prod(cuts) == copies


@examples(60)
@given(st.data())
def test_any_tensor_arrives(data: st.DataObject) -> None:
    """Shards are equal, as Alpa wants them; those that several ranks want have any number of parts."""
    shapes = st.tuples(st.integers(1, 3), st.integers(1, 3))
    (rows, columns), (hosts, chips) = data.draw(shapes), data.draw(shapes)
    first = rows * columns
    src = Mesh("src", (rows, columns), ("hosts", "chips"), tuple(range(first)))
    dst = Mesh("dst", (hosts, chips), ("hosts", "chips"), tuple(range(first, first + hosts * chips)))
    specs = st.sampled_from(["RR", "S0R", "RS0", "S01R", "RS1", "RS01"])
    source, target = data.draw(specs), data.draw(specs)
    shape = tuple(data.draw(st.sampled_from([36, 180])) for _ in range(2))
    move = TensorMove("a", shape, "int16", layout_of_spec(source, src), layout_of_spec(target, dst))
    validate(alpa_program(ReshardProblem((move,)), gathers=data.draw(st.booleans())))


def test_each_sender_sends_its_share() -> None:
    """Case 1: two hosts of four GPUs have half of the rows each, and eight ranks want a part."""
    program = alpa_program(CASES[1].problem(SMALL))
    sent = [sum(isinstance(b.op, Send) for b in program.ops_on_rank(rank)) for rank in range(8)]
    assert sent == [1] * 8
    assert sum(isinstance(b.op, AllGather) for b in program.ops_on_rank(8)) == 1


def test_three_gpus_are_sent_three_copies(study: AlpaCommStudy) -> None:
    """The drop of figure 5, and the gain of case 8, which the paper rounds to 2.5."""
    t = study.bound_s(1, 1)
    assert study.one_to_many(ALL_GATHER, 1, 3).seconds == pytest.approx(3 * t, rel=0.001)
    assert study.one_to_many(ALL_GATHER, 1, 4).seconds < 1.01 * t
    assert study.case(8, ALL_GATHER).seconds / study.case(8, BROADCAST).seconds == pytest.approx(
        2.5, rel=0.02
    )
    assert study.case(8, SEND_RECV).seconds > study.case(8, ALL_GATHER).seconds


def test_what_alpa_does_not_do_is_refused() -> None:
    mesh = Mesh.of("m", (2, 2, 2), ("x", "y", "z"))
    with pytest.raises(UnsupportedError, match="neighbouring"):
        part_layout(Layout(mesh, (Replicate(), Shard(0), Replicate())), (8, 8))
    move = CASES[1].problem(SMALL).moves[0]
    with pytest.raises(UnsupportedError, match="one tensor"):
        alpa_program(ReshardProblem((move, move)))
    with pytest.raises(UnsupportedError, match="of one shape"):
        alpa_program(CASES[1].problem((7, 4, 4)))


def test_readings_cover_rows_and_refuse_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(READINGS["alpa"].rows) < set(paper.OURS)
    for reading in READINGS.values():
        assert load_cluster(reading.cluster)
    with pytest.raises(UnsupportedError, match="did you mean 'messages'"):
        reading_named(READINGS, "message")
    assert run_app(["reproduce", "alpacomm", "--reading", "alpa", "--rows", "none_idle"]) == 2
    assert "reading alpa says nothing about row none_idle" in capsys.readouterr().err
    assert run_app(["reproduce", "alpacomm", "--reading", "alpa", "--figures", "6"]) == 2
    assert "no figures" in capsys.readouterr().err
    assert run_app(["reproduce", "alpacomm", "--reading", "alpa", "--rows", "uneven_drop", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["reading"]["name"] == "alpa"
    assert [row["verdict"] for row in data["rows"]] == ["holds", "holds"]


def test_files_are_named_after_their_reading() -> None:
    chosen = papers.select("alpacomm", ["flat_in_host"])
    assert papers.reproduce_alpacomm(selection=chosen).stem == "alpacomm-p3.8xlarge"
    assert papers.reproduce_alpacomm(selection=chosen, reading="alpa").stem == "alpacomm-alpa"


def test_messages_have_their_price(study: AlpaCommStudy) -> None:
    """Every strategy pays; one that packs strided tiles (case 3) pays more than one that does not (case 1)."""
    priced, free = AlpaCommStudy(load_cluster("p3.8xlarge-messages")), AlpaCommStudy(study.cluster)
    for strategy in (ALL_GATHER, BROADCAST):
        losses = [priced.case(n, strategy).seconds / free.case(n, strategy).seconds - 1 for n in (1, 3)]
        assert 0 < losses[0] < losses[1] < 0.02
