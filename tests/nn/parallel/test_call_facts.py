"""What ranks compare in a call: a number for facts, and words for where it differs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from meshweave.nn.parallel.call_facts import CallFacts, GivenTensor  # noqa: E402
from sampling import examples  # noqa: E402

SENT_BITS = 50
"""About as many of the lowest bits of a number are sent beside a loss."""

_KINDS = st.builds(
    GivenTensor,
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from([torch.int64, torch.int32]),
    st.booleans(),
)
_FACTS = st.builds(
    lambda kind, training, modules, options, *counts: CallFacts(
        (
            ("tokens", (("shape", kind),)),
            ("modes", (("training", training), ("modules in training", modules))),
            ("progress", tuple(options.items())),
        ),
        *counts,
    ),
    st.just("none") | _KINDS,
    st.booleans(),
    st.integers(0, 2),
    st.dictionaries(st.sampled_from(["lr", "betas"]), st.sampled_from(["0.1", "1"])),
    st.integers(0, 3),
    st.integers(0, 3),
    st.none() | st.integers(-1, 1),
)


@examples(200)
@given(_FACTS, _FACTS)
def test_numbers_are_equal_where_words_are(one: CallFacts, other: CallFacts) -> None:
    numbers = [facts.number % 2**SENT_BITS for facts in (one, other)]
    assert (numbers[0] == numbers[1]) == (one.words == other.words)


def test_a_tensor_that_is_given_is_not_none() -> None:
    assert GivenTensor.of(None) == "none"
    assert str(GivenTensor.of(torch.zeros(2, 3))) == "(2, 3) float32"
    assert str(GivenTensor.of(torch.zeros(2, device="meta"))) == "(2,) float32 on the meta device"
