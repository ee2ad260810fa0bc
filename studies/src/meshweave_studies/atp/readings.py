"""Readings of ATP: at what rates its programs run, and what a framework adds to them."""

from __future__ import annotations

from dataclasses import dataclass

from meshweave_studies.published import NamedReading, by_name

RATES = "rates"
_2D = ("megatron_over_2d", "atp_over_2d", "2d_over_atp_small", "2d_fades")
SIMULATED_ROWS = (
    *("simulated_choice", "small_model_degrades", "least_gain", "largest_gain", "gain_of_m4"),
    *(f"{name}{suffix}" for suffix in ("", "_25d") for name in _2D),
    *("table3_baseline", "table3_chunk2", "table3_chunk4", "gain_of_chunk2", "gain_of_chunk4"),
)
"""The rows of simulated layers: figures 10 and 11, and table 3."""


@dataclass(frozen=True)
class AtpReading(NamedReading):
    """A choice for what the paper leaves open.

    Attributes:
        framework: whether kernels and software are those of a framework of 2021 (`framework`), or products run at
            one rate and nothing else takes time.
        sum_bytes: bytes an element of what is summed; 2 are those of activations.
        host: whether a host issues kernels and waits for collectives, instead of seconds between two kernels.
        overlaps: whether all-reduces of gradients of inputs run beside gradients of weights (section 4.2) where
            there are no chunks, too.
    """

    framework: bool = False
    host: bool = False
    overlaps: bool = True
    sum_bytes: int = 2

    def covers(self, row: str) -> bool:
        """Return whether the reading says anything about a row of the paper."""
        return not self.rows or row in self.rows


READINGS: dict[str, AtpReading] = by_name(
    AtpReading(RATES, "products at one rate, communication beside them wherever nothing forbids it"),
    AtpReading(
        "framework",
        "kernels of A100s by shape, the software of Megatron-LM of 2021, plain attention; one op after "
        "another, and chunks in the forward pass alone (section 4.2)",
        framework=True,
        overlaps=False,
        rows=SIMULATED_ROWS,
    ),
    AtpReading(
        "framework-overlap",
        "as framework, with all-reduces of gradients of inputs beside gradients of weights (section 4.2)",
        framework=True,
        rows=SIMULATED_ROWS,
    ),
    AtpReading(
        "framework-host",
        "as framework, with a host that issues kernels and Python code and waits for collectives, as that of "
        "other published runs of this software on A100s, and no time between kernels",
        framework=True,
        host=True,
        overlaps=False,
        rows=SIMULATED_ROWS,
    ),
    AtpReading(
        "framework-four-bytes",
        "as framework, with sums of 4 bytes an element",
        framework=True,
        overlaps=False,
        sum_bytes=4,
        rows=SIMULATED_ROWS,
    ),
)
"""By name, the default first."""
