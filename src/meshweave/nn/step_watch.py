"""Measured and predicted times while a model trains: `StepWatch` records steps, and warns of what is too slow.

Every program that runs in a recorded step is simulated once on the described cluster. Measured and simulated spans
of its ops are compared by what needs no clocks that agree between hosts:

- the transfer of a collective is the shortest of the spans of its ranks, for the last to come waits for nobody;
  that of a message is the shorter of the spans of both ends;
- how much later a rank came to a collective than the first is the longest span of the collective less its own.

A link is behind where transfers along an axis take longer than predicted, a rank where its products do, or where
the others wait for it longer than predicted.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from meshweave.algorithms.step import Step
from meshweave.base.errors import DescriptionError, printable
from meshweave.describe.machine.cluster import Cluster, described
from meshweave.execute.ranks.agreement import exchange
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program import Program
from meshweave.nn.new_plan import NewPlan
from meshweave.nn.watched_programs import Pair, SimulatedRun, StepTally, add_pair
from meshweave.trace import Span, Trace
from meshweave.tune.step_search import SpaceOptions

LEAST_SHARE_OF_STEP = 0.01
"""A loss of less than this share of the step is no reason for a warning."""

NOTHING_RAN = "nothing to compare: no program ran in the context of the watch; give it that of the model"

Kind = Literal["link", "products", "late"]


class FallingBehindWarning(RuntimeWarning):
    """A link or a rank has fallen behind what was predicted, over several recorded steps."""


@dataclass(frozen=True)
class WatchRow:
    """Measured and predicted seconds, in one step, of one link or of one rank.

    Attributes:
        kind: "link" for transfers of one op along an axis, "products" for matrix products of a rank, "late" for
            how long others waited for a rank in collectives.
        op: the name of the op in its program; in rows of a rank, the op that exceeds its prediction most.
        where: the mesh axes of a link, as "axis x" or "axes x and y", or its ranks, as "ranks 0, 3"; else the
            rank, as "rank 3".
    """

    kind: Kind
    op: str
    where: str
    measured_s: float
    predicted_s: float

    @property
    def lost_s(self) -> float:
        """Return the measured seconds less the predicted ones; negative where measured is shorter."""
        return self.measured_s - self.predicted_s

    def is_behind(self, share: float, step_s: float) -> bool:
        """Return whether `lost_s` exceeds both `share` times the predicted seconds and a share of the step.

        The latter is `LEAST_SHARE_OF_STEP` times `step_s`, the seconds of the step. `share` 0.3 means 30 percent.
        """
        return self.lost_s > share * self.predicted_s and self.lost_s > LEAST_SHARE_OF_STEP * step_s

    def __str__(self) -> str:
        what = {"link": "transfers of", "products": "products of", "late": "others wait for"}[self.kind]
        subject = f"{what} {self.op} along {self.where}" if self.kind == "link" else f"{what} {self.where}"
        at = "" if self.kind == "link" else f", most at {self.op}"
        return f"{subject}: {self.measured_s * 1e3:.3g} ms, predicted {self.predicted_s * 1e3:.3g} ms{at}"


@dataclass(frozen=True)
class StepComparison:
    """A recorded step and what was predicted of its programs.

    Attributes:
        step: the number of the step, from 0.
        step_s: seconds of the step on this rank.
        rows: links and ranks, equal on all ranks.
        measured: the ops of this rank.
        predicted: the same ops as simulated; each program begins when its measured run began.
        level_factors: (position in `link_levels` of the cluster, measured over predicted seconds of the transfers
            on these links), equal on all ranks.
    """

    step: int
    step_s: float
    rows: tuple[WatchRow, ...]
    measured: Trace
    predicted: Trace
    level_factors: tuple[tuple[int, float], ...] = ()

    @property
    def product_factor(self) -> float:
        """Return measured over predicted seconds of matrix products on the rank where this ratio is largest.

        It is 1 where no products ran.
        """
        products = (row for row in self.rows if row.kind == "products" and row.predicted_s and row.measured_s)
        return max((row.measured_s / row.predicted_s for row in products), default=1.0)

    @property
    def furthest(self) -> tuple[WatchRow, ...]:
        """Return for each kind of row the one with the most seconds over prediction, the largest loss first.

        Rows that lost less than `LEAST_SHARE_OF_STEP` of the step are not among them.
        """
        ordered = sorted(self.rows, key=lambda row: row.lost_s, reverse=True)
        most: dict[str, WatchRow] = {}
        for row in ordered:
            if row.lost_s > LEAST_SHARE_OF_STEP * self.step_s:
                most.setdefault(row.kind, row)
        return tuple(most.values())

    def __str__(self) -> str:
        lines = [f"step {self.step}: {self.step_s * 1e3:.1f} ms"]
        if not self.rows:
            lines.append(f"  {NOTHING_RAN}")
        lines += [f"  differs most by {row.lost_s * 1e3:.3g} ms: {row}" for row in self.furthest]
        return "\n".join([*lines, *(f"  {row}" for row in self.rows if row not in self.furthest)])


class StepWatch:
    """Records every so many steps of training, and warns of links and ranks that fall behind what was predicted.

        watch = mw.StepWatch("h100-node", every=100)
        for batch in batches:
            with watch.step():
                train(batch)

    A recorded step times each op of the programs of the context (on CUDA of those bound with `trace`), and ends
    with two small exchanges among all ranks; the other steps cost nothing. All ranks use it alike. Each rank gives
    the warnings, `FallingBehindWarning`. `latest` is the last `StepComparison`, None before the first.

    Args:
        cluster: what is predicted for, described or named as in the catalog; rank r is its chip r.
        every: how many steps there are from one recorded step to the next. The first is the step `every`, since
            programs are bound in the first ones.
        share: the share of the prediction by which a measured time must exceed it to be behind.
        steps: in how many consecutive recorded steps something must be behind before a warning is given.
        context: whose programs are recorded; by default those of the default process group.

    Raises DescriptionError where there is no such cluster, or `every` or `steps` is no whole number from 1 on.
    """

    def __init__(
        self,
        cluster: Cluster | str,
        *,
        every: int = 100,
        share: float = 0.3,
        steps: int = 3,
        context: TorchContext | None = None,
    ) -> None:
        for name, given in (("every", every), ("steps", steps)):
            if not isinstance(given, int) or given < 1:
                raise DescriptionError(
                    f"{name} is {printable(given)}; give a whole number of steps from 1 on"
                )
        self.cluster = described(cluster)
        self.every, self.share, self.steps = every, share, steps
        self.context = context or TorchContext.default()
        self.latest: StepComparison | None = None
        self._number = 0
        self._behind: Counter[tuple[str, str, str]] = Counter()
        self._predicted: dict[Program, SimulatedRun] = {}

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run a training step in the block; record and compare it if its turn has come. Collective on such a step.

        Raises RankLostError or DeadlineError where a rank is lost or late in the exchanges of such a step.
        """
        number = self._number
        self._number += 1
        if number % self.every or not number:
            yield
            return
        recorder, before = _Recorder(), self.context.recorder
        self.context.recorder = recorder
        start = time.monotonic()
        try:
            yield
        finally:
            self.context.recorder = before
        self.latest = self._compare(number, recorder, time.monotonic() - start)
        self._warn(self.latest)

    def replan(self, step: Step, options: SpaceOptions | None = None) -> NewPlan:
        """Return the best plan if links and products stay as slow as `latest`, and its gain over the running one.

        Not collective: the answer is the same on all ranks.

        Args:
            step: the step that runs, planned for the cluster of this watch.
            options: which plans are searched; None for all that the stack of the step executes.

        Raises:
            DescriptionError: no step has been recorded yet, no program ran in it, or `step` is of another cluster.
            UnsupportedError: nothing else can be laid out or fits; or the stack does not execute the step.
        """
        if self.latest is None:
            raise DescriptionError(f"no step has been recorded yet; the first is step {self.every}, from 0")
        if not self.latest.rows:
            raise DescriptionError(f"step {self.latest.step} has {NOTHING_RAN}")
        if step.problem.cluster != self.cluster:
            raise DescriptionError(
                f"the step is planned for {step.problem.cluster.name}, and the watch predicts for "
                f"{self.cluster.name}; give both the same cluster"
            )
        return NewPlan.of(step, options, dict(self.latest.level_factors), self.latest.product_factor)

    def _compare(self, number: int, recorder: _Recorder, step_s: float) -> StepComparison:
        rank = self.context.rank or 0
        for program, _ in recorder.runs.values():
            self._prediction(program)  # here, on all ranks at once: the exchanges have a deadline
        own = [(*key, [(s.index, s.end_ps - s.start_ps) for s in trace.spans])
               for key, (_, trace) in recorder.runs.items()]  # fmt: skip
        everybody = [
            {(name, tuple(ranks), count): dict(spans) for name, ranks, count, spans in told}
            for told in self._told(own, f"the times of all ranks in step {number}")
        ]
        tally = StepTally()
        for key, (program, _) in recorder.runs.items():
            if rank == min(program.ranks):
                measured = {r: everybody[r].get(key, {}) for r in program.ranks}
                tally.add(self._prediction(program), measured)
        told = self._told(tally.told(), f"what all ranks have compared in step {number}")
        spans: list[Span] = []
        expected: list[Span] = []
        for program, trace in recorder.runs.values():
            spans += trace.spans
            begin = min((span.start_ps for span in trace.spans), default=0)
            expected += [_moved(span, begin) for span in self._prediction(program).spans(rank)]
        name = f"step {number}"
        traces = Trace(name, "torch", tuple(spans)), Trace(name, "simulate", tuple(expected))
        return StepComparison(number, step_s, _joined(told), *traces, _level_factors(told))

    def _told(self, own: Any, what: str) -> list[Any]:
        """Return what every rank tells, by rank; it goes as JSON. Collective; raises as `exchange`."""
        said = exchange(self.context, range(self.context.num_ranks), json.dumps(own), what)
        return [json.loads(said[rank]) for rank in sorted(said)]

    def _prediction(self, program: Program) -> SimulatedRun:
        if program not in self._predicted:  # not its name: products of several sizes share one
            self._predicted[program] = SimulatedRun.of(program, self.cluster)
        return self._predicted[program]

    def _warn(self, comparison: StepComparison) -> None:
        behind: dict[tuple[str, str, str], WatchRow] = {
            (row.kind, row.op if row.kind == "link" else "", row.where): row
            for row in comparison.rows
            if row.is_behind(self.share, comparison.step_s)
        }
        self._behind = Counter({key: self._behind[key] + 1 for key in behind})
        for key, count in self._behind.items():
            if count == self.steps:
                warnings.warn(
                    f"behind what was predicted in {count} recorded steps, the last of them {comparison.step}: "
                    f"{behind[key]}",
                    FallingBehindWarning,
                    stacklevel=4,
                )


RunKey = tuple[str, tuple[int, ...], int]
"""A run of a program: its name, its ranks and how many runs of it there were before in the step."""


class _Recorder:
    """The runs of programs in one step."""

    def __init__(self) -> None:
        self.runs: dict[RunKey, tuple[Program, Trace]] = {}
        self._count: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def add(self, program: Program, trace: Trace) -> None:
        """Take a run."""
        which = program.name, program.ranks
        self.runs[*which, self._count[which]] = program, trace
        self._count[which] += 1


def _joined(told: Sequence[Any]) -> tuple[WatchRow, ...]:
    """Return the rows of what all ranks tell of their sums: links by op and axis, the rest by rank."""
    links: dict[tuple[str, str], Pair] = {}
    for tally in told:
        for op, axis, *pair in tally[0]:
            add_pair(links, (op, axis), *pair)
    rows = [_row("link", op, where, pair) for (op, where), pair in links.items()]
    kinds: tuple[tuple[Kind, int], ...] = (("products", 1), ("late", 2))
    for kind, place in kinds:
        of_rank: dict[int, dict[str, Pair]] = defaultdict(dict)
        for tally in told:
            for op, rank, *pair in tally[place]:
                add_pair(of_rank[rank], op, *pair)
        for rank, ops in sorted(of_rank.items()):
            most = max(ops, key=lambda op: ops[op][0] - ops[op][1])
            total = sum(pair[0] for pair in ops.values()), sum(pair[1] for pair in ops.values())
            rows.append(_row(kind, most, f"rank {rank}", total))
    return tuple(rows)


def _level_factors(told: Sequence[Any]) -> tuple[tuple[int, float], ...]:
    """Return `StepComparison.level_factors` of what all ranks tell of their sums."""
    levels: dict[int, Pair] = {}
    for tally in told:
        for _, level, *pair in tally[3]:
            add_pair(levels, level, *pair)
    return tuple((level, took / due) for level, (took, due) in sorted(levels.items()) if took and due)


def _row(kind: Kind, op: str, where: str, pair: Pair) -> WatchRow:
    return WatchRow(kind, op, where, pair[0] / 1e12, pair[1] / 1e12)


def _moved(span: Span, begin_ps: int) -> Span:
    times = span.start_ps + begin_ps, span.end_ps + begin_ps
    return Span(span.rank, span.index, span.lane, span.kind, span.label, *times)
