"""The ranking of strategies for a block: nothing better is left out, and reasons add up."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.block import BlockProblem
from meshweave.base.errors import LayoutError, UnsupportedError
from meshweave.base.units import format_s
from meshweave.cli.app import run_app
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.links import NetworkAxis
from meshweave.describe.machine.network import TorusNetwork
from meshweave.describe.machine.tree import TreeLevel, TreeNetwork
from meshweave.describe.model import load_model
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.workload import Workload
from meshweave.tune.ranking import rank
from meshweave_studies.blocks.ranking import block_machine, block_meshes, mesh_of, rank_blocks
from meshweave_studies.blocks.reasons import _hidden, axis_uses, block_reason, gains_s, name_of, next_strategy
from sampling import examples

GPT = Transformer("small", 1, 512, 8, 8, 64, 2048, None, False, "made up")
LOAD = Workload(4, 256, "bfloat16")
SOME = ("atp", "megatron", "megatron_sp")


@examples(6)
@given(st.floats(1e8, 1e11), st.floats(1e8, 1e11), st.sampled_from([(4, 2), (2, 2), (2, 4)]))
def test_the_best_config_of_every_strategy_on_every_mesh(
    inner: float, outer: float, fanouts: tuple[int, int]
) -> None:
    """Against every config of every strategy on every mesh."""
    levels = (TreeLevel(fanouts[0], NetworkAxis("a", inner)), TreeLevel(fanouts[1], NetworkAxis("b", outer)))
    cluster = Cluster("box", load_cluster("atp-ic1").chip, TreeNetwork(levels), "a test")
    ranking = rank_blocks(GPT, LOAD, cluster, algorithms=SOME)
    best: dict[tuple[str, tuple[int, int]], float] = {}
    for mesh in block_meshes(cluster):
        for entry in rank(BlockProblem.of(GPT, LOAD, mesh), cluster):
            if entry.algorithm.name in SOME:
                key = (entry.algorithm.name, mesh)
                best[key] = min(best.get(key, 1e9), entry.estimate.total_s)
    assert {(entry.algorithm.name, mesh_of(entry)) for entry in ranking.ranked} == set(best)
    for entry in ranking.ranked:
        assert entry.seconds == best[entry.algorithm.name, mesh_of(entry)]
    assert [x.seconds for x in ranking.ranked] == sorted(x.seconds for x in ranking.ranked)


def test_sites_one_by_one_are_never_faster_and_are_ranked_by_their_own_time() -> None:
    cluster = load_cluster("atp-ic1")
    whole, apart = (
        rank_blocks(GPT, LOAD, cluster, algorithms=SOME, overlap=kind) for kind in ("layers", "sites")
    )
    by_layers = {name_of(entry): entry.seconds for entry in whole.ranked}
    assert len(apart.ranked) == len(by_layers)
    assert all(entry.seconds >= by_layers[name_of(entry)] * (1 - 1e-9) for entry in apart.ranked)
    assert any(entry.seconds > by_layers[name_of(entry)] * 1.01 for entry in apart.ranked)
    for entry, other in pairwise(apart.ranked):
        assert entry.seconds <= other.seconds


def test_estimates_know_where_sites_of_logical_meshes_share_links() -> None:
    """Four rows of two on a torus of two rows of four: rings of one axis cross each other's links."""
    axes = NetworkAxis("x", 1e9), NetworkAxis("y", 1e9)
    torus = Cluster("box", load_cluster("atp-ic1").chip, TorusNetwork(axes, (2, 4), 8), "a test")
    ranking = rank_blocks(GPT, LOAD, torus, algorithms=["atp"], overlap="sites", max_simulated=9)
    times = {name_of(entry): (entry.estimate.total_s, entry.seconds) for entry in ranking.ranked}
    assert all(simulated >= estimated * 0.999 for estimated, simulated in times.values())
    assert times["atp 2x4"][1] == pytest.approx(times["atp 2x4"][0], rel=0.01)
    assert times["atp 4x2"][1] == pytest.approx(times["atp 4x2"][0], rel=0.05)


def test_the_machine_of_the_paper_whose_root_is_slow() -> None:
    gpt = Transformer("m2", 1, 4096, 32, 32, 128, 16384, None, False, "ATP, table 2")
    load, cluster = Workload(4, 2048, "float16"), load_cluster("atp-ic1")
    ranking = rank_blocks(gpt, load, cluster, algorithms=SOME, max_simulated=3)
    first, second = ranking.ranked[:2]
    assert (name_of(first), name_of(second)) == ("atp 2x4", "atp 4x2")
    assert [entry.simulated is not None for entry in ranking.ranked[:4]] == [True, True, True, False]
    assert first.seconds >= first.estimate.total_s * 0.999  # contention adds
    uses = list(axis_uses(first, block_machine(cluster, (2, 4))))
    assert {use.link for use in uses} == {"root", "socket"}
    assert sum(use.seconds for use in uses) == pytest.approx(first.estimate.transfer_s, rel=0.02)
    megatron = next(position for position, x in enumerate(ranking.ranked) if name_of(x) == "atp 8x1")
    assert "over root" in block_reason(ranking, megatron - 1)
    for entry, other in pairwise(ranking.ranked):
        gains = gains_s(entry, other)
        assert sum(gains.values()) == pytest.approx(other.estimate.total_s - entry.estimate.total_s)
    rival = next_strategy(ranking)
    assert rival is not None and name_of(ranking.ranked[rival]) == "megatron 8x1"
    assert "over root" in block_reason(ranking, 0, rival)
    assert block_reason(ranking, 0, 99) == block_reason(ranking, 2, 1) == ""
    assert ranking.margin(len(ranking.ranked) - 1) is None
    assert ranking.margin(2) is None  # one simulated, the other estimated
    assert ranking.margin() == pytest.approx(second.seconds / first.seconds - 1)


def test_what_cannot_be_ranked() -> None:
    cluster = load_cluster("atp-ic3:4")
    with pytest.raises(UnsupportedError, match="there is no algorithm 'atpp'"):
        rank_blocks(GPT, LOAD, cluster, algorithms=["atpp"])
    with pytest.raises(UnsupportedError, match="solves a Matmul2dProblem"):
        rank_blocks(GPT, LOAD, cluster, algorithms=["meshslice"])
    with pytest.raises(
        UnsupportedError, match="no strategy runs a block of small on 4 chips of atp-ic3: megatron"
    ):
        rank_blocks(GPT, LOAD, cluster, algorithms=["megatron"], mesh_shapes=[(2, 2)])
    for mesh in ((3, 1), (4, 2)):
        with pytest.raises(LayoutError, match="is not one of the 4 chips of atp-ic3"):
            rank_blocks(GPT, LOAD, cluster, algorithms=["megatron"], mesh_shapes=[mesh])


def test_no_more_is_hidden_than_there_is() -> None:
    """Copies run beside products as communication does, and are told with it."""
    load, cluster = Workload(4, 2048, "bfloat16"), load_cluster("h100-node:3")
    (first,) = rank_blocks(
        load_model("gpt3"), load, cluster, algorithms=["wang_block"], mesh_shapes=[(1, 3)]
    ).ranked
    times = first.estimate
    hidden = times.compute_s + times.copy_s + times.communication_s - times.total_s
    assert times.communication_s < hidden <= times.communication_s + times.copy_s
    assert _hidden(first) == (
        f"hides {format_s(hidden)} of {format_s(times.communication_s + times.copy_s)} of communication and copies"
    )


def test_a_program_that_takes_minutes_is_not_simulated_and_that_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--batch", "64", "--algorithm", "collective_block", "--mesh", "64x64"]
    assert run_app(["tune", "block", "gpt3", "--cluster", "dgx-h100:4096", *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "None is simulated: the program of collective_block, 1 chunk, has 253,952 ops on all ranks" in said


def test_the_verbs(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    picture = tmp_path / "block.svg"
    options = ["--cluster", "atp-ic1", "--batch", "1", "--sequence", "256", "--algorithm", "atp,megatron"]
    assert (
        run_app(["tune", "block", "gpt3", *options, "--count", "2", "--simulate", "1", "--svg", str(picture)])
        == 0
    )
    out = capsys.readouterr().out
    assert "Why the first is ahead of the second: atp " in out
    assert picture.read_text().startswith("<svg")
    assert run_app(["tune", "block", "gpt3", *options, "--mesh", "8x1", "--simulate", "0", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(x["algorithm"], x["mesh"], x["simulated_s"]) for x in data["entries"]] == [
        ("atp", [8, 1], None),
        ("megatron", [8, 1], None),
    ]
    assert data["entries"][0]["reason"] == "atp 8x1 and megatron 8x1 take the same time"
    assert run_app(["tune", "mesh", "atp-ic4"]) == 0
    assert "ATP-4" in capsys.readouterr().out
    assert run_app(["tune", "mesh", "atp-ic3", "--printed", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["meshes"][0]["mesh"] == [8, 1] and data["layers"][0]["size"] == 8
    assert run_app(["tune", "block", "gpt3", *options, "--mesh", "2x2x2"]) == 2


def test_layers_with_experts_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"qwen3-30b-a3b has experts.*meshweave plan"):
        rank_blocks(load_model("qwen3-30b-a3b"), LOAD, load_cluster("dgx-h100:8"))
