"""The regression: constants come back from noisy data, and data that do not fit are refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.calibrate import FitLimits, Sample, fit_samples
from sampling import examples

SIZES = (16_000, 40_000, 96_000, 224_000, 512_000)


def line(launch_s, sync_s, rate, factors, steps=(1, 3)):
    """A sample per size and number of steps; each time off by its factor."""
    points = [(size, count) for size in SIZES for count in steps]
    return [
        Sample(factor * (launch_s + count * (sync_s + size / rate)), size, count)
        for (size, count), factor in zip(points, factors, strict=True)
    ]


noise = st.lists(st.floats(0.99, 1.01), min_size=10, max_size=10)


@examples(20)
@given(
    st.floats(1e6, 1e10),
    st.floats(0.2, 2.0),
    noise,
    st.sets(st.integers(0, 9), max_size=2),
    st.floats(1.5, 20.0),
)
def test_slow_outliers_do_not_move_the_constants(rate, share, factors, outliers, slower):
    sync_s = share * SIZES[2] / rate
    factors = [factor * (slower if at in outliers else 1.0) for at, factor in enumerate(factors)]
    fit = fit_samples("x", line(0.0, sync_s, rate, factors))
    for size in SIZES:
        assert fit.seconds(size, 3) == pytest.approx(3 * (sync_s + size / rate), rel=0.06)
    assert fit.num_points == 10 and fit.steps == (1, 3)


@examples(20)
@given(st.floats(1e6, 1e10), st.floats(0.1, 2.0), st.floats(0.5, 5.0))
def test_exact_data_give_the_constants_back(rate, sync_share, launch_share):
    unit_s = SIZES[1] / rate
    fit = fit_samples("x", line(launch_share * unit_s, sync_share * unit_s, rate, [1.0] * 10))
    assert fit.rate_per_s == pytest.approx(rate, rel=0.01)
    assert fit.sync_s == pytest.approx(sync_share * unit_s, rel=0.05)
    assert fit.launch_s == pytest.approx(launch_share * unit_s, rel=0.05)
    assert fit.worst_error < 1e-3 and not fit.problems(FitLimits()) and not fit.remark


def test_one_number_of_steps_leaves_the_launch_in_sync():
    fit = fit_samples("x", line(2e-3, 1e-3, 1e8, [1.0] * 5, steps=(1,)))
    assert fit.launch_s == 0 and fit.sync_s == pytest.approx(3e-3, rel=0.01)
    assert "cannot be told" in fit.remark


def test_a_launch_within_the_noise_is_none():
    factors = [1.01, 0.99, 0.98, 1.02, 1.0, 1.01, 0.99, 1.02, 0.98, 1.0]
    fit = fit_samples("x", line(0.0, 1e-3, 1e8, factors))
    assert fit.launch_s == 0 and "launch" in fit.remark


def test_a_product_has_a_launch_and_no_sync():
    samples = [Sample(1e-4 + flops / 1e9, flops) for flops in (1e5, 1e6, 1e7, 1e8)]
    fit = fit_samples("products", samples, is_transfer=False)
    assert (fit.launch_s, fit.sync_s) == (pytest.approx(1e-4, rel=0.01), 0)
    assert fit.rate_per_s == pytest.approx(1e9, rel=0.01)


def test_no_rate_is_above_that_of_the_link():
    samples = [Sample(5e-3 + size / 2e8, size) for size in SIZES]
    fit = fit_samples("x", samples, max_per_s=1e8)
    assert fit.rate_per_s == pytest.approx(1e8)
    assert fit.problems(FitLimits(median_error=1e-3, worst_error=1e-3))


def test_coefficients_are_never_negative():
    samples = [Sample(size**1.3 / 1e9, size) for size in SIZES]  # the straight line has a negative intercept
    fit = fit_samples("x", samples)
    assert fit.sync_s == 0 and fit.launch_s == 0 and fit.rate_per_s > 0


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([Sample(1e-3, size) for size in SIZES], "does not grow"),
        ([Sample(1 / size, size) for size in SIZES], "does not grow"),
        ([Sample(size / 1e8, size) for size in SIZES[:3]], "at least 4"),
        ([Sample(1e-3, 1000)] * 6, "1 points"),
        ([], "0 points"),
        ([Sample(size / 1e8 * (3 if size % 3 else 1), size) for size in SIZES], "worst error"),
    ],
)
def test_what_does_not_fit_is_refused(samples, said):
    fit = fit_samples("x along row", samples)
    problems = fit.problems(FitLimits())
    assert any(said in problem for problem in problems), (fit, problems)
    assert all(problem.startswith("x along row: ") and "\n" not in problem for problem in problems)
    assert fit.to_json()["rate_per_s"] is None or math.isfinite(fit.to_json()["rate_per_s"])
