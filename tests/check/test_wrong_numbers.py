"""The proof of a contract fails where numbers are wrong, or are no numbers."""

from __future__ import annotations

import numpy as np
import pytest

import meshweave as mw

PROBLEM = mw.algorithms.Matmul2dProblem(8, 8, 8, (2, 2), "os")


@pytest.mark.parametrize(("added", "said"), [(1.0, "numbers differ by 1"), (np.nan, "numbers differ by inf")])
def test_one_wrong_number_is_enough(monkeypatch: pytest.MonkeyPatch, added: float, said: str) -> None:
    entry = mw.algorithm("collective")
    assert not any(proof.failed for proof in mw.prove_contract(entry, PROBLEM))
    right = type(entry).results

    def wrong(self, problem, config, outputs):
        name, value = next(iter(right(self, problem, config, outputs).items()))
        value = value.copy()
        value[0, 0] += added
        return {name: value}

    monkeypatch.setattr(type(entry), "results", wrong)
    proofs = list(mw.prove_contract(entry, PROBLEM))
    assert proofs and all(proof.failed == said for proof in proofs)
