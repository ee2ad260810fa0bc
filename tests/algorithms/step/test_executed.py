"""What is said to be executed beside the rules of the modules that execute it."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import pytest

from meshweave.algorithms.step import Parallelism
from meshweave.algorithms.step.executed import layer_roles, sequence_refusal, splits_rows
from meshweave.algorithms.step.space import tensor_strategies
from meshweave.base.errors import LayoutError, MeshweaveError, UnsupportedError


def laid_out(name: str) -> list[Parallelism]:
    """Return configurations of a strategy on up to 12 ranks, with and without a ring of context ranks."""
    made = []
    for context, rows, columns in itertools.product((1, 2), (1, 2, 3), (1, 2)):
        choice = Parallelism(context=context, tensor=(rows, columns), strategy=name)
        try:
            layer_roles(choice)
        except MeshweaveError:
            continue
        made.append(choice)
    return made


@pytest.mark.parametrize("name", tensor_strategies())
def test_rules_are_those_of_modules_with_a_models_own_code(name: str) -> None:
    torch = pytest.importorskip("torch", reason="modules with a model's own code are torch's")
    from meshweave.nn.hosted.experts import _check
    from meshweave.nn.hosted.residual import Tokens
    from meshweave.nn.parallel.strategy import LayerStrategy

    part, refused = SimpleNamespace(forms={"w": None}), set()
    assert len(laid_out(name)) > 2
    for choice in laid_out(name):
        roles, mesh = layer_roles(choice)
        strategy = SimpleNamespace(name=name, roles=roles, mesh=SimpleNamespace(shape=mesh))
        strategy.span = partial(LayerStrategy.span, strategy)
        try:
            _check(strategy, "experts", "Experts", part)
            splits = False
        except UnsupportedError as error:
            assert "reads whole rows" in str(error)
            splits = True
        assert splits == splits_rows(roles, mesh), choice
        tokens = Tokens(strategy)
        for share in range(12, 36):
            sequence = choice.context * share  # which check_step asks for
            try:
                tokens.check(torch.zeros((12, sequence), device="meta"))
                is_taken = True
            except LayoutError as error:
                assert "a multiple" in str(error)
                is_taken = False
            assert is_taken == (sequence_refusal(choice, sequence) == ""), (choice, sequence)
            refused.add(is_taken)
    assert refused == ({True, False} if name == "megatron_sp" else refused)
