"""Bound programs that a context keeps: what is dropped, and that all ranks drop the same."""

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.algorithms.matmul2d import Matmul2dConfig, Matmul2dProblem
from meshweave.algorithms.table import PRODUCTS_2D
from sampling import examples

pytest.importorskip("torch")
from meshweave.execute.torch.cache import ProgramCache, program_bytes

SETS = ((0, 1, 2, 3), (0, 1), (2, 3), (1, 2))


class Value:
    """Something that can be watched."""


def use(cache, ranks, key, num_bytes):
    """One call of a program; returns whether it had to be bound."""
    if cache.get(ranks, key) is not None:
        return False
    cache.put(ranks, key, Value(), num_bytes)
    return True


@pytest.mark.filterwarnings("ignore:a program of:RuntimeWarning")
@examples(60)
@given(
    st.lists(st.tuples(st.sampled_from(SETS), st.integers(0, 9)), max_size=80),
    st.integers(1, 60),
)
def test_ranks_that_see_other_calls_beside_bind_the_same_ones_together(calls, limit_bytes):
    caches = {rank: ProgramCache(limit_bytes) for rank in range(4)}
    for ranks, key in calls:
        num_bytes = 1 + key * key % 11
        assert len({use(caches[rank], ranks, key, num_bytes) for rank in ranks}) == 1
        for rank in ranks:
            assert caches[rank].num_bytes(ranks) <= max(limit_bytes, num_bytes)


def test_the_least_recently_used_goes_first_with_what_is_tied_to_it():
    cache, plans = ProgramCache(3), {"a": 1, "b": 2}
    for name in "ab":
        cache.put((0, 1), name, Value(), 1).tie(plans, name)
    dropped = weakref.ref(cache.get((0, 1), "b").value)
    cache.get((0, 1), "a").touch()
    cache.put((0, 1), "c", Value(), 2)
    gc.collect()
    assert plans == {"a": 1} and dropped() is None
    assert cache.get((0, 1), "b") is None and len(cache) == 2


def test_a_program_larger_than_the_limit_stays_while_it_is_used():
    cache = ProgramCache(10)
    cache.put((0,), "large", Value(), 100)
    assert cache.get((0,), "large") is not None
    cache.put((0,), "small", Value(), 1)
    assert cache.get((0,), "large") is None


def test_a_working_set_that_does_not_fit_is_warned_about_once():
    cache = ProgramCache(1)
    use(cache, (0,), "a", 1)
    use(cache, (0,), "b", 1)
    with pytest.warns(RuntimeWarning, match="give it more cache_bytes"):
        use(cache, (0,), "a", 1)
    use(cache, (0,), "b", 1)  # a second warning would be an error


@pytest.mark.filterwarnings("ignore:a program of:RuntimeWarning")
def test_memory_of_dropped_programs_is_given_back(monkeypatch):
    """Programs that refer to themselves, as lanes do, are gone once a quarter of a small limit was dropped."""
    trimmed = []
    monkeypatch.setattr("meshweave.execute.torch.cache._malloc_trim", lambda: trimmed.append)
    cache, values = ProgramCache(80), []
    gc.disable()
    gc.freeze()  # what other tests have made: each program that is dropped would wait for a look at all of it
    try:
        for number in range(100):
            value = Value()
            value.own = value
            values.append(weakref.ref(value))
            cache.put((0, 1), number, value, 10)
            del value
            assert sum(each() is not None for each in values) <= len(cache) + 3
    finally:
        gc.enable()
    assert len(trimmed) == 92 // 3


def test_the_size_of_a_program_is_that_on_the_rank_where_it_is_largest():
    small, large = (
        program_bytes(
            PRODUCTS_2D["collective"].program(
                Matmul2dProblem(m=size, n=size, k=size, mesh_shape=(2, 2)), Matmul2dConfig()
            )
        )
        for size in (31, 1024)
    )
    assert large - small > 2 * 3 * 4 * (1024 * 1024 - 32 * 32) // 4
