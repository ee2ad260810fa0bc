"""The records of a plan's JSON that are of whole steps, and the types that all of its records share."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from meshweave.algorithms.block.problem import Overlap
from meshweave.base.units import format_bytes
from meshweave.describe.model.memory import Pairs

# Bounds keep a damaged file from asking for sizes that overflow, or take for ever to look at.
Dim = Annotated[int, Field(gt=0, le=2**64, description="a whole number from 1 to 2**64")]
Width = Annotated[int, Field(gt=0, le=2**31)]
Taken = Annotated[float, Field(gt=0, allow_inf_nan=False, description="a finite number above 0")]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, description="a finite number of seconds")]
Bytes = Annotated[int, Field(ge=0, le=2**128, description="a whole number of bytes")]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False, description="a finite fraction of at least 0")]


class Record(BaseModel):
    """A frozen table of a plan file; a key that is no field of it is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DescriptionRecord(Record):
    """What a plan was made for, whole: see `tune.plan_description`.

    Attributes:
        model: the table of a model file.
        cluster: the table of a cluster file, with the constants of its kernels.
        settings: of a plan of a step, the attributes of `mw.algorithms.StepProblem` that are not the default ones.
    """

    model: dict[str, Any]
    cluster: dict[str, Any]
    settings: dict[str, Any] = Field(default_factory=dict)


class DegreesRecord(Record):
    """One configuration of a step: the fields of `mw.Parallelism` but `zero_group`, which plans leave None.

    `data`, `pipeline`, `context`, `tensor`, `expert` and `expert_tensor` are degrees: numbers of ranks, `tensor`
    also (rows, columns) of a mesh. `micro_batch` is sequences; `order` lists degrees, innermost first.
    """

    data: Width
    pipeline: Width
    context: Width
    tensor: Width | Annotated[tuple[Width, ...], Field(min_length=2, max_length=2)]
    strategy: str
    zero: int = Field(ge=0, le=3, description="a ZeRO level from 0 to 3")
    schedule: str
    virtual_stages: Width
    micro_batch: Width
    recompute: Literal["none", "selective", "full"]
    order: tuple[Literal["tensor", "context", "data", "pipeline"], ...] = Field(min_length=4, max_length=4)
    expert: Width = 1
    expert_tensor: Width = 1

    @model_serializer(mode="wrap")
    def _without_ones(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the table without degrees of experts of one rank, which files of dense models never have."""
        table: dict[str, Any] = write(self)
        return {k: v for k, v in table.items() if k not in ("expert", "expert_tensor") or v != 1}

    @property
    def num_chips(self) -> int:
        """Return the number of chips: data x pipeline x context x tensor ranks; experts take no more."""
        return self.data * self.pipeline * self.context * self.tensor_ranks

    @property
    def tensor_ranks(self) -> int:
        """Return the tensor-parallel degree: for a mesh of tensor ranks, the product of its two sizes."""
        return self.tensor if isinstance(self.tensor, int) else math.prod(self.tensor)


class StepRecord(Record):
    """A configuration, in `degrees`, with its predicted training step.

    Attributes:
        step_s: seconds of a step.
        parts_s: those seconds by the fields of `StepParts`; communication is what is exposed.
        memory_bytes: bytes of the fullest chip.
        memory_parts: those bytes by the fields of `RankMemory`.
        tokens_per_s_per_chip: tokens of the batch over seconds and chips.
        mfu, hfu: FLOPs of the model, and those with recomputation, over the peak; `StepsRecord.pairs` says which
            pairs of tokens count.
        mfu_all_pairs: `mfu` with all pairs of tokens; None in older files.
    """

    degrees: DegreesRecord
    step_s: Taken
    parts_s: dict[str, Seconds]
    memory_bytes: Bytes
    memory_parts: dict[str, Bytes]
    tokens_per_s_per_chip: Taken
    mfu: Share
    hfu: Share
    mfu_all_pairs: Share | None = None

    def usd_per_million_tokens(self, usd_per_chip_hour: float) -> float:
        """Return the dollars that a million tokens cost if one chip costs `usd_per_chip_hour` dollars an hour."""
        return usd_per_chip_hour / 3600 / self.tokens_per_s_per_chip * 1e6


class SensitivityRecord(Record):
    """The effect of a change of the machine on a plan.

    Attributes:
        change: the change, in words.
        same_s: seconds of a step of the same configuration.
        best_s: least seconds of a step among the ranked configurations.
        best: the position of that configuration in the ranking, from 0.
    """

    change: str
    same_s: Seconds
    best_s: Seconds
    best: int = Field(ge=0)


class StepsRecord(Record):
    """The steps of a plan: what was searched, and the ranking.

    Attributes:
        memory_limit_bytes: the most bytes that a chip may hold.
        reserve_bytes: what stays free of its memory besides.
        ranked: the best configuration of each set of degrees and strategy, the fastest first, but for `margin`.
        front: configurations of which none is both faster and smaller, the fastest first.
        searched: numbers of what was looked at: `nodes` (layouts with a micro-batch), `priced`, `over_memory`,
            `refused`.
        overlap: what communication of a layer was priced to overlap with, as `StepProblem.overlap`; "layers" in
            files that lack it.
        is_complete: whether the search ran to its end.
        num_exact: how many of the first rows no other configuration of the space is faster than, not counting a
            first row that `margin` puts before faster ones; the others are the best of those that were priced.
        margin: by which share of its time the first row may be slower than the second: it has a strategy that
            published runs have, and the faster ones have none; 0 where the first row is the fastest.
        pairs: the pairs of tokens that `mfu` and `hfu` count; "all" in older files.
        ceiling: the highest share of its peak that products of a chip have shown; None in older files.
        defaults: the step with the defaults of `mw.step` for all that the plan was free to choose; None in older
            files, and where it cannot be laid out, for the reason in `defaults_refused`.
        above_ceiling: why utilizations in the ranking are above `ceiling`; "" where none is.
        stack: the software stack whose overheads are added, and that executes what was searched.
        precision: the recipe of the products of layers below 16 bits; "" where they run in the plan's dtype.
        priced_as: in words, the dtype that prices `precision` where it was not measured on the chip; "" else.
        attention_as: in words, the rate of attention where it was not fitted on the chip; "" where it was.
        ideal: the best configuration priced by kernels and communication alone; None with the stack "ideal", and
            in older files.
    """

    memory_limit_bytes: Bytes
    reserve_bytes: Bytes = 0
    ranked: tuple[StepRecord, ...] = Field(min_length=1, description="a list of at least one configuration")
    front: tuple[StepRecord, ...] = ()
    searched: dict[str, int] = Field(default_factory=dict)
    overlap: Overlap = "layers"
    is_complete: bool = True
    num_exact: int = Field(default=0, ge=0)
    sensitivity: tuple[SensitivityRecord, ...] = ()
    pairs: Pairs = "all"
    ceiling: Share | None = None
    above_ceiling: str = ""
    defaults: StepRecord | None = None
    defaults_refused: str = ""
    margin: Share = 0.0
    stack: str = "ideal"
    precision: str = ""
    priced_as: str = ""
    attention_as: str = ""
    ideal: StepRecord | None = None

    def reason_above(self, *utilizations: float) -> str:
        """Return why the highest of the utilizations (0 to 1) is above the ceiling; "" if it is not."""
        return "" if self.ceiling is None or max(utilizations) <= self.ceiling else self.above_ceiling

    @property
    def limit_text(self) -> str:
        """Return the memory of a chip and the reserve that stays free, in words."""
        whole = format_bytes(self.memory_limit_bytes + self.reserve_bytes)
        return f"{whole}, {format_bytes(self.reserve_bytes)} kept free" if self.reserve_bytes else whole

    @property
    def best(self) -> StepRecord:
        """Return the configuration that is chosen."""
        return self.ranked[0]

    @property
    def runner_up(self) -> StepRecord | None:
        """Return the second configuration of the ranking; None if there is one only."""
        return self.ranked[1] if len(self.ranked) > 1 else None


def degrees_of(fields: Any) -> DegreesRecord:
    """Return the record of a configuration.

    Args:
        fields: any object with the attributes of a `DegreesRecord`, such as a `Parallelism`.
    """
    return DegreesRecord(**{name: getattr(fields, name) for name in DegreesRecord.model_fields})
