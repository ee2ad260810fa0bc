"""Equations 2 to 4 of ATP: the paper's examples, exactly."""

from fractions import Fraction
from itertools import pairwise

import pytest

from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.model import load_model
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload
from meshweave_studies.matrix.device_meshes import (
    MeshTime,
    algorithm_bandwidth,
    device_meshes,
    link_bandwidth,
    mesh_bandwidth,
    rank_meshes,
)
from meshweave_studies.matrix.hierarchy import CommunicationMatrix, MatrixLayer, MeasuredBandwidth

GIGA = 10**9
FIGURE_7A = CommunicationMatrix(
    "figure 7(a)",
    (
        MatrixLayer.uniform("nodes", 4, 25 * GIGA, 25 * GIGA),
        MatrixLayer.uniform("GPUs", 4, 200 * GIGA, 600 * GIGA),
    ),
)
GPT = Transformer("gpt", 1, 64, 4, 4, 16, 256, None, False, "made up")
LOAD = Workload(4, 8, "float16")


def one_layer(size: int, bandwidth: int = GIGA) -> CommunicationMatrix:
    return CommunicationMatrix("one", (MatrixLayer.uniform("all", size, bandwidth, bandwidth),))


def best(*args: object, **options: object) -> tuple[int, int]:
    return rank_meshes(*args, GPT, LOAD, **options)[0].mesh_shape  # type: ignore[arg-type]


def test_figure_7a() -> None:
    plain = mesh_bandwidth(FIGURE_7A, (8, 2), corrected=False)
    assert (plain.first_link, plain.second_link) == (Fraction(25, 2) * GIGA, 600 * GIGA)
    corrected = mesh_bandwidth(FIGURE_7A, (8, 2))
    assert (corrected.first_link, corrected.second_link) == (Fraction(25, 2) * GIGA, 200 * GIGA)
    assert (corrected.first_layer, corrected.second_layer) == ("nodes", "GPUs")
    assert mesh_bandwidth(FIGURE_7A, (4, 4)).second_link == 600 * GIGA  # three links of 200 each
    assert mesh_bandwidth(FIGURE_7A, (2, 8)).first_link == Fraction(25, 4) * GIGA  # a node has 4 devices
    assert mesh_bandwidth(FIGURE_7A, (2, 8), sharing="printed").first_link == Fraction(25, 8) * GIGA
    assert mesh_bandwidth(FIGURE_7A, (16, 1)).second is None
    with pytest.raises(LayoutError, match="mesh 8x1 has 8 devices, figure 7\\(a\\) has 16"):
        mesh_bandwidth(FIGURE_7A, (8, 1))


def test_equation_4_and_back() -> None:
    assert algorithm_bandwidth(Fraction(100), 4) == Fraction(200, 3)
    assert link_bandwidth(algorithm_bandwidth(Fraction(7), 6), 6) == 7


def test_equation_2_by_hand() -> None:
    """2 L b s e (7 h / (d1 B2) + 2 h / (d2 B1)), e bytes an element."""
    (time,) = [x for x in rank_meshes(one_layer(8), GPT, LOAD, layers=3) if x.mesh_shape == (4, 2)]
    b1, b2 = Fraction(4, 6) * GIGA, GIGA
    scale = 2 * 3 * 4 * 8 * 2
    assert (time.first_s, time.second_s) == (scale * 2 * 64 / (2 * b1), scale * Fraction(7 * 64, 4 * b2))


@pytest.mark.parametrize("entry", ["atp-ic5", "atp-ic6"])
def test_the_optimum_where_all_bandwidths_are_equal(entry: str) -> None:
    """Section 5.4: the formula, the best meshes, and the curves of figure 12."""
    expected = [(2, 1), (4, 1), (4, 2), (8, 2), (8, 4), (16, 4), (16, 8), (32, 8), (32, 16)]
    least, flat = [], []
    for exponent, mesh in enumerate(expected, start=1):
        ranked = rank_meshes(load_cluster(f"{entry}:{2**exponent}"), GPT, LOAD)
        assert ranked[0].mesh_shape == mesh
        unit = _unit(ranked)
        for time in ranked:
            d1, d2 = time.mesh_shape
            assert time.total_s / unit == Fraction(14 * d2 + 4 * d1 - 18, d1 * d2)
        least.append(ranked[0].total_s)
        flat.append(next(x.total_s for x in ranked if x.mesh_shape[1] == 1))
    assert least[:3] == sorted(least[:3]) and least[2:] == sorted(least[2:], reverse=True)
    assert all(a < b for a, b in pairwise(flat))


def _unit(ranked: list[MeshTime]) -> Fraction:
    """2 L b s h / GroupBW."""
    d1, d2 = ranked[0].mesh_shape
    return ranked[0].total_s * d1 * d2 / (14 * d2 + 4 * d1 - 18)


def test_calibrated_bandwidths_of_ic1() -> None:
    """Section 5.3: ATP-4 46 % below ATP-1. The catalog's tree was made of the same three numbers."""
    measured = (
        MeasuredBandwidth((2, 4), 1_200_000_000, 4_950_000_000),
        MeasuredBandwidth((8, 1), 970_000_000, None),
    )
    tree = load_cluster("atp-ic1")
    for machine in (one_layer(8).with_measured(measured), tree):
        times = {x.mesh_shape: x.total_s for x in rank_meshes(machine, GPT, LOAD)}
        assert round(float(1 - times[2, 4] / times[8, 1]), 4) == 0.4550


def test_choices_of_the_paper_and_of_its_equations() -> None:
    ic3, ic4, ic2 = (load_cluster(name) for name in ("atp-ic3", "atp-ic4", "atp-ic2"))
    assert best(ic3) == (4, 2)
    assert best(ic3, sharing="printed") == (8, 1)
    assert best(load_cluster("atp-ic4-flat")) == (8, 2)
    assert best(load_cluster("atp-ic4-flat"), sharing="printed") == (16, 1)
    assert best(ic4) == best(FIGURE_7A) == (4, 4)
    assert best(ic2) == (4, 2)
    assert best(ic2, with_equation_4=False) == (8, 1)


def test_meshes() -> None:
    assert device_meshes(12) == ((12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12))
    assert device_meshes(1) == ((1, 1),)


def test_devices_without_a_link_between_them_pass_through_others() -> None:
    ring = CommunicationMatrix("ring", (MatrixLayer.ring("ring", 4, 10),))
    assert mesh_bandwidth(ring, (2, 2)).first_link == 10  # ranks 0 and 2: both rings use each link
    assert mesh_bandwidth(ring, (2, 2)).second_link == 10
    assert mesh_bandwidth(ring, (4, 1)).first_link == 20


def test_a_model_with_experts_is_not_that_of_equation_2() -> None:
    """Its all-reduces were those of attention alone."""
    with pytest.raises(UnsupportedError, match="mixtral-8x7b has experts"):
        rank_meshes(load_cluster("dgx-h100"), load_model("mixtral-8x7b"), Workload(4, 64))
