"""A plan: what a search chose for a model on a cluster, in a form that saves, loads and explains itself.

A plan of products has the algorithms for the layers of one block on all chips. A plan of steps has
configurations of a whole training step: degrees of parallelism with time and memory. Both are one JSON file
with one loader.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

from pydantic import Field

from meshweave.algorithms.matmul2d.common.passes import PASSES, PassName, Stationary, pass_rule
from meshweave.algorithms.matmul2d.common.problem import Matmul2dConfig
from meshweave.base.errors import DescriptionError
from meshweave.describe import files
from meshweave.tune.plan_records import Bytes, Dim, Record, Seconds, StepsRecord, Width


class PassPlan(Record):
    """One product: its sizes, slices, and estimated times in seconds per layer and step.

    `runner_up` names the next best config on the same mesh and how much slower it is, in words.
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


class Plan(Record):
    """What was chosen for a model on a cluster, ranked, as a JSON file.

    Attributes:
        kind: "products": algorithms for the fully connected layers of one block; "step": configurations of a whole
            training step. Files of format 1 are of products.
        candidates: of a plan of products, all algorithms at their best, the fastest first.
        steps: of a plan of a step, the ranked configurations.
        note: what the estimated times leave out.
        unmeasured: at which rate products are priced that nobody measured; "" where somebody did.
    """

    format: Literal["meshweave-plan-1", "meshweave-plan-2"] = "meshweave-plan-2"
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
    unmeasured: str = ""

    @property
    def best(self) -> Candidate:
        """Return the fastest algorithm. Raises DescriptionError where this is no plan of products."""
        if not self.candidates:
            raise DescriptionError(
                "this is the plan of a step, and has no products; plan those with: meshweave plan --products"
            )
        return self.candidates[0]

    @property
    def step(self) -> StepsRecord:
        """Return the ranked configurations of a step. Raises DescriptionError where this is a plan of products."""
        if self.steps is None:
            raise DescriptionError("this is a plan of products; plan a step with: meshweave plan")
        return self.steps

    def candidate(self, algorithm: str) -> Candidate:
        """Return the candidate of one algorithm. Raises DescriptionError where the plan has none."""
        for candidate in self.candidates:
            if candidate.algorithm == algorithm:
                return candidate
        known = ", ".join(candidate.algorithm for candidate in self.candidates)
        raise DescriptionError(f"the plan has no algorithm '{algorithm}'; it has {known}")

    def save(self, path: Path) -> None:
        """Write the plan as JSON. Raises DescriptionError where the file cannot be written."""
        try:
            path.write_text(json.dumps(self.model_dump(mode="json"), indent=1) + "\n")
        except OSError as error:
            raise DescriptionError(f"{path}: cannot write: {error.strerror}") from None


def load_plan(path: Path) -> Plan:
    """Return the plan in a JSON file.

    Raises:
        DescriptionError: the file is no plan or contradicts itself; the message names file and key.
    """
    plan = files.check_table(Plan, files.parse_table(files.read_text(path), path, "json"), path)
    _check_kind(plan, path)
    if plan.kind == "step":
        _check_steps(plan, path)
        return plan
    names = [layer.name for layer in plan.best.layers]
    for i, candidate in enumerate(plan.candidates):
        at = f"candidates.{i}"
        if any(other.algorithm == candidate.algorithm for other in plan.candidates[:i]):
            files.fail(path, f"{at}.algorithm", f"{candidate.algorithm} is listed twice; give each once")
        if math.prod(candidate.mesh_shape) != plan.num_chips:
            shape = "x".join(map(str, candidate.mesh_shape))
            files.fail(
                path, f"{at}.mesh_shape", f"{shape} is not a mesh of the {plan.num_chips} chips planned"
            )
        if [layer.name for layer in candidate.layers] != names or len(set(names)) != len(names):
            files.fail(path, f"{at}.layers", "give the same layers for each candidate, each once")
        for j, layer in enumerate(candidate.layers):
            _check_layer(layer, path, f"{at}.layers.{j}")
    return plan


def _check_kind(plan: Plan, path: Path) -> None:
    if plan.format == "meshweave-plan-1" and plan.kind != "products":
        files.fail(path, "format", "plans of a step are of format meshweave-plan-2")
    wanted, other = ("steps", "candidates") if plan.kind == "step" else ("candidates", "steps")
    if not getattr(plan, wanted):
        files.fail(path, wanted, f"a plan of kind '{plan.kind}' has at least one of them")
    if getattr(plan, other):
        files.fail(path, other, f"a plan of kind '{plan.kind}' has none")


def _check_steps(plan: Plan, path: Path) -> None:
    for key in ("ranked", "front"):
        for i, record in enumerate(getattr(plan.step, key)):
            if record.degrees.num_chips != plan.num_chips:
                files.fail(
                    path,
                    f"steps.{key}.{i}.degrees",
                    f"they make {record.degrees.num_chips} chips, not the {plan.num_chips} planned",
                )
    times = [record.step_s for record in plan.step.ranked]
    if times != sorted(times):
        files.fail(path, "steps.ranked", "list the fastest first")
    for i, record in enumerate(plan.step.sensitivity):
        if record.best >= len(times):
            files.fail(path, f"steps.sensitivity.{i}.best", f"give a position from 0 to {len(times) - 1}")


def _check_layer(layer: LayerPlan, path: Path, at: str) -> None:
    if tuple(item.name for item in layer.passes) != PASSES:
        files.fail(path, f"{at}.passes", f"give exactly {', '.join(PASSES)}")
    size = {"t": layer.tokens, "i": layer.in_features, "o": layer.out_features}
    for number, item in enumerate(layer.passes):
        rule = pass_rule(layer.stationary, item.name, layer.transposed)
        m, n, k = (size[letter] for letter in rule.sizes)
        if (item.m, item.n, item.k) != (m, n, k):
            given = f"{item.m} x {item.n} x {item.k}"
            files.fail(path, f"{at}.passes.{number}", f"M x N x K is {given}; this layer has {m} x {n} x {k}")
