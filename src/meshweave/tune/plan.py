"""A plan: what a search chose for a model on a cluster, in a form that saves, loads and explains itself.

A plan of products has the algorithms for the layers of one block on all chips. A plan of steps has
configurations of a whole training step: degrees of parallelism with time and memory. Both are one JSON file
with one loader (`tune.plan_file`).
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from meshweave.algorithms.matmul2d.common.passes import PassName, Stationary
from meshweave.algorithms.matmul2d.common.problem import Matmul2dConfig
from meshweave.base.errors import DescriptionError
from meshweave.base.lazy import without_package
from meshweave.base.outputs import write_file
from meshweave.base.shown import Shown
from meshweave.tune.plan_records import Bytes, DescriptionRecord, Dim, Record, Seconds, StepsRecord, Width


class PassPlan(Record):
    """One product: its sizes, slices, and estimated times in seconds per layer and step.

    `slices`, `block`, `packets` and `overlap` are those of its `Matmul2dConfig`. `exposed_s` is `total_s` less
    `compute_s`: what communication takes beyond the time in which a rank computes. `peak_bytes` is the most that
    rank 0 holds at once. `runner_up` says in words the next best config on the mesh and how much slower it is.
    """

    name: PassName
    m: Dim
    n: Dim
    k: Dim
    dataflow: Literal["os", "ls", "rs"]
    slices: tuple[Width, ...] = Field(
        min_length=1, max_length=2**16, description="a list of 1 to 65536 widths, each at least 1"
    )
    block: Dim
    packets: int = Field(default=1, gt=0, le=2**16, description="a whole number from 1 to 65536")
    overlap: Literal["row", "col"] = "col"
    total_s: Seconds
    compute_s: Seconds
    launch_s: Seconds
    sync_s: Seconds
    transfer_s: Seconds
    exposed_s: Seconds
    peak_bytes: Bytes
    runner_up: str = ""

    @property
    def config(self) -> Matmul2dConfig:
        """Return the chosen config."""
        return Matmul2dConfig(self.slices, self.block, self.packets, self.overlap)


class LayerPlan(Record):
    """The plan of one fully connected layer.

    Attributes:
        stationary: the matrix that does not move in any of its products: "x", "w" or "y".
        transposed: whether all its matrices are stored transposed; see `algorithms.matmul2d.common.passes`.
        reason: why that matrix is stationary, in words.
        passes: its three products.
    """

    name: str
    tokens: Dim
    in_features: Dim
    out_features: Dim
    stationary: Stationary
    transposed: bool = False
    reason: str
    passes: tuple[PassPlan, ...]


class Candidate(Record):
    """One algorithm with its best mesh shape and configs.

    Attributes:
        block_s: estimated seconds of all products of one block, forward and backward.
        utilisation: FLOP utilisation, as a fraction of the chips' peak.
        traffic_bytes: bytes that rank 0 moves, by mesh axis.
        runner_up: the next best mesh shape and how much slower it is, in words.
        base: name in the table of algorithms where that differs: `wang` for `wang[S=meshslice]`.
    """

    algorithm: str
    mesh_shape: tuple[Width, ...] = Field(
        min_length=2, max_length=3, description="a list of two or three sizes, each at least 1"
    )
    block_s: Seconds
    utilisation: float = Field(ge=0, allow_inf_nan=False, description="a finite fraction of at least 0")
    traffic_bytes: dict[str, Bytes]
    layers: tuple[LayerPlan, ...] = Field(min_length=1, description="a list of at least one layer")
    runner_up: str = ""
    base: str = ""

    @property
    def entry_name(self) -> str:
        """Return the algorithm's name in the table of algorithms."""
        return self.base or self.algorithm


class Plan(Shown, Record):
    """What was chosen for a model on a cluster, ranked, as a JSON file.

    Attributes:
        kind: "products": algorithms for the fully connected layers of one block; "step": configurations of a whole
            training step. Files of format 1 are of products; formats 1 and 2 have no description.
        candidates: of a plan of products, all algorithms at their best, the fastest first.
        steps: of a plan of a step, the ranked configurations.
        note: what the estimated times leave out.
        not_priced: what of the model the estimated times leave out, a few words each.
        description: the model and the cluster, whole; None in files of older formats.
        unmeasured: in words, the rate of products where no kernel of the chip was measured; "" where one was.
    """

    format: Literal["meshweave-plan-1", "meshweave-plan-2", "meshweave-plan-3"] = "meshweave-plan-3"
    kind: Literal["products", "step"] = "products"
    model: str
    cluster: str
    num_chips: Width
    batch: Dim
    sequence: Dim
    dtype: str
    candidates: tuple[Candidate, ...] = ()
    steps: StepsRecord | None = None
    note: str = ""
    not_priced: tuple[str, ...] = ()
    description: DescriptionRecord | None = None
    unmeasured: str = ""

    @property
    def best(self) -> Candidate:
        """Return the fastest algorithm. Raises DescriptionError for a plan of a step."""
        if not self.candidates:
            raise DescriptionError(
                "this is the plan of a step, and has no products; plan those with: meshweave plan --products"
            )
        return self.candidates[0]

    @property
    def step(self) -> StepsRecord:
        """Return the ranked configurations of a step. Raises DescriptionError for a plan of products."""
        if self.steps is None:
            raise DescriptionError("this is a plan of products; plan a step with: meshweave plan")
        return self.steps

    def candidate(self, algorithm: str) -> Candidate:
        """Return the candidate of one algorithm. Raises DescriptionError if the plan has none."""
        for candidate in self.candidates:
            if candidate.algorithm == algorithm:
                return candidate
        known = ", ".join(candidate.algorithm for candidate in self.candidates)
        raise DescriptionError(f"the plan has no algorithm '{algorithm}'; it has {known}")

    def summary(self, price: float | None = None) -> str:
        """Return the plan in some lines of text.

        For a plan of a step: the best choice, the runner-up and why it is slower, and what to do next. For a
        plan of products: each algorithm at its best, with its time for a block and its share of the peak, the
        fastest first.

        Args:
            price: of a chip-hour, in dollars, which adds the price of tokens to a plan of a step; None leaves it
                out. Ignored for a plan of products.
        """
        from meshweave.tune.plan_summary import product_lines, step_lines

        return "\n".join(product_lines(self) if self.steps is None else step_lines(self, self.steps, price))

    def to_dataframe(self) -> Any:
        """Return the ranking as a `DataFrame` of pandas, in its order, a row for each configuration.

        Columns of a step are the fields of `mw.Parallelism` but `zero_group`, then `step_s`,
        `tokens_per_s_per_chip`, `mfu`, `hfu` and `memory_bytes`, the seconds of each part (`compute_s`,
        `tensor_s`, ...) and the bytes of each kind (`weights_bytes`, ...). Those of products are `algorithm`,
        `mesh_shape`, `block_s` and `utilisation`.

        Raises:
            UnsupportedError: pandas is not installed; the library does not need it otherwise.
        """
        from meshweave.tune.plan_summary import product_rows, step_rows

        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError as error:
            raise without_package(error, "Plan.to_dataframe") from error
        rows = product_rows(self) if self.steps is None else step_rows(self.steps)
        return pandas.DataFrame(list(rows))

    def __str__(self) -> str:
        """Return the summary."""
        return self.summary()

    def __repr__(self) -> str:
        """Return a line: what is planned, and what was chosen."""
        from meshweave.tune.plan_summary import chosen_text, headline

        return f"Plan({headline(self)}: {chosen_text(self)})"

    def save(self, path: Path) -> None:
        """Write the plan as JSON to `path`. Raises DescriptionError if the file cannot be written."""
        write_file(path, json.dumps(self.model_dump(mode="json"), indent=1) + "\n")
