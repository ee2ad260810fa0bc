"""Exchanges of tokens that are given something wrong, or odd: one clear error on every rank, or right results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from meshweave.algorithms.experts.functions import add_rows, gate_gradient, weigh  # noqa: E402
from meshweave.base.errors import LayoutError, RankLostError, UnsupportedError  # noqa: E402
from meshweave.execute.ranks.launch import launch  # noqa: E402
from meshweave.nn import ExpertExchange, grouped_product  # noqa: E402

HERE = Path(__file__).parent
ENV = {"PYTHONPATH": str(HERE)}
DEADLINE_S = 5.0


def _check(num_ranks: int, by_all: bool, tables: tuple[str, ...]) -> None:
    sys.path.insert(0, str(HERE))
    from expert_misuse_rank_functions import ODD, TABLES

    payload = {"tables": tables, "by_all": by_all, "deadline_s": DEADLINE_S}
    said = launch("expert_misuse_rank_functions:misuse", num_ranks, payload, timeout_s=200.0, env=ENV)
    for name, (_, word) in [item for table in tables for item in TABLES[table].items()]:
        for rank, answers in enumerate(said):
            answer = answers[name]
            assert answer["error"].endswith("Error") and "raw" not in answer["error"], (name, rank, answer)
            assert word in answer["text"] and "\n" not in answer["text"], (name, rank, answer)
            assert answer["seconds"] < DEADLINE_S, (name, rank, answer)
            if answer["error"] == "BindError" and "settings" not in tables:
                assert f"rank {ODD} refuses" in answer["text"], (name, rank, answer)


@pytest.mark.gloo
def test_what_one_rank_gives_wrongly_is_named_on_all() -> None:
    _check(2, False, ("wrong", "unlike"))


@pytest.mark.gloo
@pytest.mark.slow
def test_what_all_ranks_give_wrongly_is_refused() -> None:
    _check(2, True, ("wrong", "settings"))
    _check(4, False, ("wrong", "unlike"))


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("entry", ["experts_direct", "experts_pairwise", "experts_put", "experts_fused"])
def test_odd_inputs_are_exchanged_rightly(entry: str) -> None:
    """Also no tokens, other strides, half precision, NaN, and pairs that are dropped beside infinite rows."""
    for differences in launch(
        "expert_misuse_rank_functions:right_but_odd", 2, {"entry": entry}, timeout_s=200.0, env=ENV
    ):
        for name, difference in differences.items():
            assert difference < (0.05 if name in ("half", "bfloat16") else 1e-5), (name, difference)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("before", ["dispatch", "combine"])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "SIGTERM"])
def test_a_rank_that_is_lost_in_an_exchange_is_named(tmp_path: Path, name: str, before: str) -> None:
    payload = {"signal": name, "before": before, "deadline_s": DEADLINE_S, "folder": str(tmp_path)}
    with pytest.raises(RankLostError, match="rank 1"):
        launch("expert_misuse_rank_functions:die_in_exchange", 3, payload, timeout_s=60.0, env=ENV)
    for rank in (0, 2):
        error, missing, seconds = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (error, missing) == ("RankLostError", [1]), (rank, error, missing)
        assert seconds < DEADLINE_S + 5


def test_gradients_of_gradients_are_refused() -> None:
    """Without an error such terms would be missing in the second gradient."""
    exchange = ExpertExchange([0], 2)
    x, gates = torch.ones(3, 4, requires_grad=True), torch.ones(3, 1, requires_grad=True)
    rows, handle = exchange.dispatch(x, torch.tensor([[0], [1], [1]]))
    summed = exchange.combine(rows * rows, handle, gates)
    for what, made in (("dispatch to experts", rows), ("combine of experts", summed)):
        with pytest.raises(UnsupportedError, match=f"{what} is differentiable once"):
            torch.autograd.grad(made.sum(), x, create_graph=True)


def test_groups_that_do_not_fit_their_rows_are_refused() -> None:
    """Rows beyond the groups would have whatever lay in memory."""
    rows, weights = torch.ones(6, 16), torch.ones(2, 16, 8)
    for sizes in ([3, 2], [3, 4], [6], [7, -1], [2, 2, 2]):
        with pytest.raises(LayoutError, match="rows"):
            grouped_product(rows, weights, sizes)
    for odd in (weights.double(), weights[0], torch.ones(2, 8, 8)):
        with pytest.raises(LayoutError, match="matrices"):
            grouped_product(rows, odd, [3, 3])


def test_a_pair_that_is_dropped_brings_nothing_of_other_rows() -> None:
    """Where it has no row, the first one stands for it, which may be infinite; its gate may be NaN."""
    choices = np.array([[1, 0], [0, -1], [-1, -1]])
    rows = np.array([[[np.inf, 1.0], [2.0, 3.0], [4.0, 5.0]]])
    gates = np.array([[0.5, 0.25], [2.0, np.nan], [np.nan, np.inf]])
    for make in (np.asarray, torch.tensor):
        summed = np.asarray(weigh(make(rows), make(gates), choices))
        assert np.isinf(summed[0, 0]) != np.isinf(summed[1, 0]) and (summed[2] == 0).all()
        assert (
            np.isfinite(summed[:, 1]).all()
            and np.isfinite(np.asarray(add_rows(make(rows), choices))[2]).all()
        )
        gradient = np.asarray(gate_gradient(make(rows), make(np.ones((3, 2))), choices))
        assert (gradient[choices < 0] == 0).all()
    assert np.isnan(gates[1, 1]) and np.isinf(rows[0, 0, 0])  # what was given is as it was
