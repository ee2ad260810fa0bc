"""From measured times to a file: constants where they belong, and the file reads as the same cluster."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.calibrate import fit_calibration, plan_sweep, to_toml
from meshweave.cost.machine import mesh_machine
from meshweave.describe.catalog import clusters
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.cluster import Cluster, load_cluster
from meshweave.describe.machine.host import HostRates
from meshweave.describe.machine.links import CommConstants, NetworkAxis
from meshweave.describe.machine.network import HostsNetwork, RingNetwork, SwitchNetwork, TorusNetwork
from meshweave.describe.machine.tree import TreeLevel, TreeNetwork
from sampling import examples

RATE, SYNC_S, FLOPS_PER_S = 5e6, 2e-4, 1e9


def reloaded(tmp_path, cluster, comments=()):
    path = tmp_path / "cluster.toml"
    path.write_text(to_toml(cluster, comments), encoding="utf-8")
    copy = load_cluster(path)
    assert copy == cluster and copy.note == cluster.note
    return copy


def torus_cluster():
    axes = (NetworkAxis("row", 6e6, 1e-4, 2), NetworkAxis("col", 6e6, 1e-4, 1))
    chip = Chip("paced rank", (("float32", 1e9), ("float64", 1e9)), 1e9, 2 * 10**9, 5e9, source="paced")
    return Cluster("box", chip, TorusNetwork(axes, (4, 2), 8), "lab description", note="a note")


def simulated(sweep, num_ranks, slow=1.0, rate=RATE):
    """What ranks would measure on a machine that follows the model, one repetition in three disturbed."""

    def times(case):
        out = []
        for repetition in range(3):
            scale, run = 5.0 if repetition == 1 else slow, []
            for loop in case.loops:
                if loop.kind == "compute":
                    run.append([scale * (1e-5 + loop.amount / FLOPS_PER_S), scale * loop.copy_bytes / 1e10])
                else:
                    run.append([scale * loop.steps * (SYNC_S + loop.amount / rate)])
            out.append(run)
        return out

    return [{"times": [times(case) for case in sweep.cases]}] * num_ranks


def test_constants_land_on_their_axes_and_survive_the_file(tmp_path):
    sweep = plan_sweep(torus_cluster(), (4, 2), [16384, 65536, 131072, 262144])
    calibration = fit_calibration(sweep, simulated(sweep, 8), source="a test")
    assert calibration.problems == ()
    cluster = reloaded(tmp_path, calibration.cluster, ["two\nlines", "bell \x07"])
    assert cluster.network.shape == (4, 2) and [axis.num_directions for axis in cluster.network.axes] == [
        2,
        1,
    ]
    assert cluster.chip.effective_flops_per_s == pytest.approx(FLOPS_PER_S, rel=0.01)
    assert cluster.chip.memory_bytes_per_s == pytest.approx(1e10, rel=0.01)
    assert cluster.chip.launch_s == pytest.approx(1e-5, rel=0.1)
    machine = mesh_machine(cluster, (4, 2), ("row", "col"))
    for axis in ("tp.row", "tp.col"):
        for kind in ("all_gather", "reduce_scatter", "send_recv", "broadcast", "reduce"):
            constants = machine.constants(axis, kind)
            assert constants.bytes_per_s == pytest.approx(RATE, rel=0.01)
            assert constants.sync_s + constants.launch_s == pytest.approx(SYNC_S, rel=0.05)
    assert "median error" in cluster.network.axes[0].source and "busy" in cluster.note
    assert "a note" in cluster.note
    busy = calibration.to_json()["busy"]
    assert {entry["kind"] for entry in busy} >= {"all_gather", "products", "copies"}
    assert all(entry["samples"] for entry in busy)


def test_without_nominal_links_their_rate_is_the_measured_one(tmp_path):
    cluster = load_cluster("local-cpu").with_chips(2)
    sweep = plan_sweep(cluster, (1, 2), [16384, 65536, 131072, 262144])
    calibration = fit_calibration(sweep, simulated(sweep, 2), source="a test", has_nominal_links=False)
    link = reloaded(tmp_path, calibration.cluster).network.link
    assert link.link_bytes_per_s == pytest.approx(RATE, rel=0.01)
    assert link.link_latency_s == pytest.approx(SYNC_S, rel=0.01)
    assert calibration.cluster.chip.peak_flops_per_s[0][0] == "float32"


def test_a_line_through_three_points_is_no_rate_of_a_link(tmp_path):
    """Operations alone run at three sizes: noise of microseconds makes any rate of them, with small errors."""
    sweep = plan_sweep(load_cluster("local-cpu").with_chips(3), (1, 3))
    answers = simulated(sweep, 3)
    for case, times in zip(sweep.cases, answers[0]["times"], strict=True):
        if not case.is_busy and case.loops[0].kind == "all_gather":
            for run in times:
                run[0][0] = 2e-3 + case.loops[0].amount * 1e-12
    calibration = fit_calibration(sweep, answers, source="a test", has_nominal_links=False)
    assert calibration.problems == ()
    alone = calibration.alone["loopback", "all_gather"]
    assert alone.num_points == 3 and alone.rate_per_s > 1e10 and alone.worst_error < 0.01
    link = reloaded(tmp_path, calibration.cluster).network.link
    assert RATE < link.link_bytes_per_s * 1.01 < 2 * RATE


def test_times_that_do_not_grow_with_the_size_are_a_problem_and_no_crash(tmp_path):
    """What a disturbed machine may measure, and `--accept-misfit` writes."""
    sweep = plan_sweep(load_cluster("local-cpu").with_chips(2), (1, 2), [16384, 65536])
    answers = simulated(sweep, 2, rate=float("inf"))
    calibration = fit_calibration(sweep, answers, source="a test", has_nominal_links=False)
    assert any("does not grow" in problem for problem in calibration.problems), calibration.problems
    assert reloaded(tmp_path, calibration.cluster).network.link.link_bytes_per_s == 1e24


def test_times_that_the_link_cannot_have_are_a_misfit():
    sweep = plan_sweep(torus_cluster(), (4, 2), [16384, 65536, 131072, 262144])
    calibration = fit_calibration(sweep, simulated(sweep, 8, slow=0.1), source="a test")
    assert any("send_recv along row" in problem for problem in calibration.problems)


def test_chains_that_do_not_fit_are_remarked_upon_and_kept():
    sweep = plan_sweep(torus_cluster(), (4, 2), [16384, 65536, 131072, 262144])
    measured = simulated(sweep, 8)[0]["times"]
    for case, times in zip(sweep.cases, measured, strict=True):
        for at, loop in enumerate(case.loops):
            if loop.kind == "broadcast":  # as chains that overlap entirely
                for run in times:
                    run[at] = [loop.packets * loop.amount / RATE * (0.2 if loop.packets == 1 else 1.0)]
    calibration = fit_calibration(
        sweep, [{"times": measured}] * 8, source="a test", send_buffer_bytes=1 << 20
    )
    fit = calibration.busy["row", "broadcast"]
    assert calibration.problems == () and "median error" in fit.remark and "over 25%" in fit.remark
    axis = calibration.cluster.network.axes[0]
    assert dict(axis.constants)["broadcast"].bytes_per_s == pytest.approx(fit.rate_per_s, rel=1e-5)
    assert fit.remark in axis.source and calibration.cluster.send_buffer_bytes == 1 << 20


@pytest.mark.parametrize("name", clusters())
def test_every_cluster_of_the_catalog_survives_the_file(name, tmp_path):
    reloaded(tmp_path, load_cluster(name))


number = st.floats(1.0, 1e20)
seconds = st.floats(0.0, 1e3)
words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)
axis = st.builds(
    NetworkAxis,
    st.sampled_from(["nic", 'quoted " name', "back\\slash"]),
    number,
    seconds,
    st.sampled_from([1, 2]),
    st.lists(
        st.tuples(
            st.sampled_from(["all_gather", "send_recv"]), st.builds(CommConstants, number, seconds, seconds)
        ),
        max_size=1,
    ).map(tuple),
    seconds,
    words,
)
level = st.builds(TreeLevel, st.integers(1, 9), axis, st.integers(1, 9), st.none() | axis)
network = st.one_of(
    st.builds(RingNetwork, axis, st.integers(1, 99)),
    st.builds(SwitchNetwork, axis, st.integers(1, 99)),
    st.builds(HostsNetwork, st.integers(1, 9), st.integers(1, 9), axis, st.integers(1, 9), axis),
    st.builds(TreeNetwork, st.lists(level, min_size=1, max_size=4).map(tuple)),
    st.builds(lambda a, b: TorusNetwork((a, b), (2, 3), 6), axis, axis),
    st.builds(lambda a: TorusNetwork((a, a), None, 16, True, 4, 64), axis),
)


@examples(30)
@given(network, words, words, number)
def test_any_cluster_survives_the_file(tmp_path_factory, network, source, note, rate):
    chip = Chip("chip", (("float32", rate),), rate, 7, rate, 1e-6, source)
    cluster = Cluster("box", chip, network, source, HostRates(0.5), note, 12345)
    reloaded(tmp_path_factory.mktemp("toml"), cluster)
