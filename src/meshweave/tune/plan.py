"""A plan: what the tuner chose for a model on a cluster, in a form that saves, loads and explains itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from meshweave.algorithms.matmul.passes import PassName, Stationary
from meshweave.algorithms.matmul.problem import Config
from meshweave.describe import files
from meshweave.errors import DescriptionError


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PassPlan(_Record):
    """One product: its sizes, slices, and estimated times in seconds per layer and step."""

    name: PassName
    m: int = Field(gt=0)
    n: int = Field(gt=0)
    k: int = Field(gt=0)
    dataflow: Literal["os", "ls", "rs"]
    slices: tuple[int, ...] = Field(min_length=1)
    block: int = Field(gt=0)
    packets: int = Field(default=1, gt=0)
    overlap: Literal["row", "col"] = "col"
    total_s: float
    compute_s: float
    launch_s: float
    sync_s: float
    transfer_s: float
    exposed_s: float
    peak_bytes: int

    @property
    def config(self) -> Config:
        return Config(self.slices, self.block, self.packets, self.overlap)


class LayerPlan(_Record):
    """One fully connected layer: which matrix stays put, why, and its three products."""

    name: str
    tokens: int = Field(gt=0)
    in_features: int = Field(gt=0)
    out_features: int = Field(gt=0)
    stationary: Stationary
    reason: str
    passes: tuple[PassPlan, ...]


class Candidate(_Record):
    """One algorithm at its best: mesh shape, layers, estimated seconds of one block's products (all passes)
    and FLOP utilisation against the chip's peak."""

    algorithm: str
    mesh_shape: tuple[int, ...]
    block_s: float
    utilisation: float
    traffic_bytes: dict[str, int]
    layers: tuple[LayerPlan, ...]
    runner_up: str = ""


class Plan(_Record):
    """`candidates` are ranked, the best first. Times are estimates; `note` says what they leave out."""

    format: Literal["meshweave-plan-1"] = "meshweave-plan-1"
    model: str
    cluster: str
    num_chips: int = Field(gt=0)
    batch: int = Field(gt=0)
    sequence: int = Field(gt=0)
    dtype: str
    candidates: tuple[Candidate, ...] = Field(min_length=1)
    note: str = ""

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def candidate(self, algorithm: str) -> Candidate:
        """The entry of one algorithm. Raises DescriptionError."""
        for candidate in self.candidates:
            if candidate.algorithm == algorithm:
                return candidate
        known = ", ".join(candidate.algorithm for candidate in self.candidates)
        raise DescriptionError(f"the plan has no algorithm '{algorithm}'; it has {known}")

    def save(self, path: Path) -> None:
        """Writes JSON. Raises DescriptionError where the file cannot be written."""
        try:
            path.write_text(json.dumps(self.model_dump(mode="json"), indent=1) + "\n")
        except OSError as error:
            raise DescriptionError(f"{path}: cannot write: {error.strerror}") from None


def load_plan(path: Path) -> Plan:
    """Reads a plan. Raises DescriptionError naming file and key for anything that is no plan."""
    return files.check(Plan, files.load(path), path)
