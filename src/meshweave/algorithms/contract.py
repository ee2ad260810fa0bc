"""The contract of algorithms: the methods that planners, simulators, tests and reports call on any algorithm.

A *problem* says what is to be computed and where operands and results lie. A *config* is one choice of what the
problem leaves open: slice counts, the stationary matrix, an order of messages. An *algorithm* turns both into a
`Program`, and answers questions about that program without writing it where a closed form is known.

The relations between the methods are the contract. `tests/algorithms/test_contract.py` checks each of them for
every entry of the table, so a new entry needs no test of its own:

    meaning     run(program(p, c), x) == reference(p, x) for every c in candidates(p) that has a program, in any
                legal order of ops; tensors of the problem lie in the program's as `operands` and `results` say
    soundness   validate(program(p, c)) leaves nothing unproved, unless `is_proved` says that it cannot
    layouts     placements(p)[t] is the layout of the input or output buffer that holds tensor t
    traffic     traffic(p, c, r) is what rank r moves in program(p, c), in bytes per mesh axis
    memory      peak_bytes(p, c, r) is the most that rank r holds at once in program(p, c): equal, or within a
                share of it, as `memory_accuracy` says
    time        estimate(p, c, m) is the uncontended simulation of program(p, c) on m, and `outside_s`: equal, no
                less, or within a share of it, as `estimate_accuracy` says
    gradients   for g in gradients(p): <dy, f(x + e) - f(x)> == <program of g, e>, where e changes g.wrt alone

Problems and configs are frozen, hashable values. Everything is deterministic: equal arguments give equal programs
on every rank of every machine.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshweave.cost.machine import Machine
from meshweave.describe.layout import Layout
from meshweave.describe.machine.cluster import Cluster
from meshweave.estimate import Estimate, estimate
from meshweave.ir.analysis.lifetimes import peak_bytes
from meshweave.ir.program import Program
from meshweave.ir.work import traffic

Array = NDArray[Any]
Arrays = Mapping[str, Array]
"""Whole tensors by name."""

ProblemT = TypeVar("ProblemT", bound=Hashable)
ConfigT = TypeVar("ConfigT", bound=Hashable)


@dataclass(frozen=True)
class Within:
    """An accuracy: off by at most a share of the true value, above or below.

    Attributes:
        share: share of the true value, 0.01 for 1 %.
    """

    share: float


def within(share: float) -> Within:
    """Return the accuracy "off by at most `share` (0 to 1) of the true value", so 0.01 for 1 %."""
    return Within(share)


Accuracy = Literal["exact", "upper_bound"] | Within
"""How a closed form compares with the program. "exact": equal, to the picosecond; "upper_bound": never less."""


def is_accurate(accuracy: Accuracy, claimed: float, true: float, rounding: float = 0.0) -> bool:
    """Return whether `claimed`, what a closed form gives, is as near to the `true` value as `accuracy` says.

    "exact" means equal to `true`, "upper_bound" at least `true`, and `within(share)` off by at most `share`
    times `true`. An error of `rounding` is allowed in each case. `claimed`, `true` and `rounding` have the same
    unit, such as seconds or bytes.
    """
    share = accuracy.share if isinstance(accuracy, Within) else 0.0
    too_much = 0.0 if accuracy == "upper_bound" else claimed - (1 + share) * true
    return max(too_much, (1 - share) * true - claimed) <= rounding


@dataclass(frozen=True)
class Gradient(Generic[ProblemT]):
    """The problem whose solution is the gradient with respect to one input of a forward problem.

    Attributes:
        wrt: name of the forward problem's input tensor.
        problem: the problem to solve; any algorithm for problems of its type may solve it.
        operands: for each input tensor of `problem`, the forward tensor whose values it takes. The name of a
            forward output stands for the gradient that arrives for it.
        transposed: tensors of `problem`, inputs or output, that are transposes of what `operands` and `wrt` name.
        output: name of the tensor of `problem` that holds the gradient.
    """

    wrt: str
    problem: ProblemT
    operands: Mapping[str, str]
    output: str
    transposed: frozenset[str] = field(default=frozenset())


def number_dtype(dtype: str) -> str:
    """Return the numpy dtype that stands for tensors of `dtype` in tests: float32 for bfloat16 and float16.

    Any other dtype is returned unchanged.
    """
    return "float32" if dtype in ("bfloat16", "float16") else dtype


class Algorithm(ABC, Generic[ProblemT, ConfigT]):
    """An algorithm for problems of type `problem_type`. The table holds one instance of each subclass.

    A problem says what to compute, and in which layouts inputs and outputs lie on the ranks. A config is one
    choice of what the problem leaves open, such as the number of slices. From both follows one `Program`: the ops
    of all ranks. Tensors are named; "whole" tensors are the global ones, before they are sharded.

    Attributes:
        name: the key in the table, as on the command line.
        title: the name in tables and pictures.
        source: where the algorithm is published.
        problem_type: the type of its problems; algorithms of one type compete with each other.
        config_fields: the fields that change its programs, of those of a config (or of a `ScheduleRequest`) that
            not all algorithms for the type read. A command line refuses the others.
        estimate_accuracy: how `estimate` compares with the uncontended simulation. An upper bound is within a
            picosecond per op where all shards are equal.
        memory_accuracy: how `peak_bytes` compares with what the program holds; None where that is not known.
        is_proved: whether `validate` proves programs. It cannot where calls have no equations: there only a run is
            compared with `reference`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    problem_type: ClassVar[type[Hashable]]
    config_fields: ClassVar[tuple[str, ...]] = ()
    estimate_accuracy: ClassVar[Accuracy] = "exact"
    memory_accuracy: ClassVar[Accuracy | None] = "exact"
    is_proved: ClassVar[bool] = True

    @abstractmethod
    def examples(self) -> Iterator[ProblemT]:
        """Yield problems small enough to print, run and prove in a second. `meshweave show` prints the first."""

    @abstractmethod
    def candidates(self, problem: ProblemT, cluster: Cluster | None = None) -> Iterator[ConfigT]:
        """Yield the configs that a planner may choose among, the simplest first.

        Args:
            cluster: the machine, for algorithms whose configs depend on it. Without it they assume that all ranks
                are alike.
        """

    @abstractmethod
    def program(self, problem: ProblemT, config: ConfigT) -> Program:
        """Return the program, for all ranks, that solves the problem as the config says.

        Raises:
            LayoutError: the config does not fit the problem.
            UnsupportedError: the algorithm can estimate the config, but writes no program for it.
        """

    @abstractmethod
    def reference(self, problem: ProblemT, inputs: Arrays) -> dict[str, Array]:
        """Return the whole output tensors by name, computed in numpy in one process.

        Args:
            inputs: the whole input tensors, by name.
        """

    def placements(self, problem: ProblemT) -> dict[str, Layout]:
        """Return the layout (mesh and placements) of every input and output tensor, by name.

        This default writes the program of the first config. Algorithms override it where the layouts follow from
        the problem.
        """
        buffers = self.program(problem, next(iter(self.candidates(problem)))).buffers
        placed = ((b.tensor, b.layout) for b in buffers if b.kind in ("input", "output"))
        return {name: layout for name, layout in placed if name is not None and layout is not None}

    def estimate(self, problem: ProblemT, config: ConfigT, machine: Machine) -> Estimate:
        """Return the predicted time of a config: that of its program without contention, plus `outside_s`.

        This default writes the program and steps through its ops. Algorithms with many configs override it with a
        closed form.

        Args:
            machine: the cluster with the program's meshes laid on it, as `machine` returns it.
        """
        return estimate(self.program(problem, config), machine)

    def machine(self, problem: ProblemT, config: ConfigT, cluster: Cluster) -> Machine:
        """Return the cluster with the meshes of a config's program laid on it, for `estimate`.

        A mesh that is no part of a torus becomes a logical mesh, whose neighbours may be several hops apart.
        """
        return Machine.of(cluster, self.program(problem, config), logical=True)

    def branches(
        self, problem: ProblemT, part: Any = None, limit_s: float = math.inf
    ) -> Iterator[Any] | None:
        """Return the smaller sets into which a branch-and-bound search divides a set of candidates, its `part`.

        Returns None if `part` is a single config, which cannot be divided. This default returns None also for
        `part` None: there is no search, and all of `candidates` are priced one by one. An algorithm with too many
        candidates for that overrides `branches` and `lower_bound`.

        Args:
            part: a set of candidates, or a config, that an earlier call yielded; None for all candidates. The
                search finishes each part that is yielded for None before it starts the next; inside such a part
                it takes the smaller part with the least lower bound first.
            limit_s: candidates that take this many seconds or more cannot change the result, and may be left
                out.
        """
        return None

    def lower_bound(self, problem: ProblemT, part: Any, *, is_tight: bool = False) -> float:
        """Return a lower bound, in seconds, of the time of every config of a part; this default returns 0.

        Args:
            part: what `branches` yielded: a set of candidates, or a single config.
            is_tight: whether to compute a higher bound, even if that takes longer. A search asks for it only for
                parts that `branches` yields for None, and for one of them only when its quick bound is the least.
        """
        return 0.0

    def row(self, problem: ProblemT, part: Any) -> Hashable:
        """Return the key of the row that a config gets in a printed ranking.

        Configs with equal keys share a row, which shows only the best of them. This default returns `part`, so
        that each config has a row of its own.

        Args:
            part: a config, or a set of candidates that `branches` yielded and that fall into one row.
        """
        own: Hashable = part
        return own

    def admits(self, problem: ProblemT, config: ConfigT) -> bool:
        """Return whether a config may be chosen; this default returns True.

        A search asks before it prices a config, but not where a bound has ruled it out already.
        """
        return True

    def preference(self, problem: ProblemT, config: ConfigT, estimate: Estimate) -> Any:
        """Return the value that decides between configs of equal time: the config with the smaller value wins.

        This default returns 0 for all configs, so that the first one wins. `estimate` is the config's own.
        """
        return 0

    def outside_s(self, problem: ProblemT, config: ConfigT) -> float:
        """Return the seconds that `estimate` adds to those of the program's ops, as for logging; 0 by default."""
        return 0.0

    def refusal(self, problem: ProblemT) -> str | None:
        """Return in a few words why the algorithm cannot solve a problem of `problem_type`; None if it can."""
        return None

    def traffic(self, problem: ProblemT, config: ConfigT, rank: int) -> dict[str, int]:
        """Return the logical bytes that a rank moves, as {mesh axis ("tp.row") or mesh ("tp"): bytes}.

        Key "" has the bytes of messages, of one-sided ops, and of groups of ranks that are no mesh or mesh axis.
        Bytes received count for an all-gather, broadcast, recv, get and permute; bytes sent for a reduce-scatter,
        reduce, put, accumulate and all-to-all; both halves of an all-reduce (`ir.work.bytes_moved`).

        Args:
            rank: a global rank.
        """
        return traffic(self.program(problem, config), rank)

    def peak_bytes(self, problem: ProblemT, config: ConfigT, rank: int = 0) -> int:
        """Return the most bytes that one rank, a global number, holds at once, inputs and outputs included."""
        return peak_bytes(self.program(problem, config), rank)

    def gradients(self, problem: ProblemT) -> tuple[Gradient[Any], ...]:
        """Return one `Gradient` (the problem to solve for it) per differentiable input; this default returns ().

        An input is left out where its gradient needs operands in other layouts than they have.
        """
        return ()

    def functions(self, problem: ProblemT) -> Mapping[str, Callable[..., Any]]:
        """Return the Python functions that the program's `call` ops run, by the function name in the op.

        A function gets the op's input arrays, then the op's `args`, and returns the op's outputs
        (`execute.calls`). This default is for programs without `call` ops: it returns {}.
        """
        return {}

    def calls(self, problem: ProblemT, config: ConfigT) -> Mapping[str, Callable[..., Any]]:
        """Return the functions of one config's `call` ops, by name; this default returns `functions`.

        An algorithm overrides it if the functions depend on the config.
        """
        return self.functions(problem)

    def operands(self, problem: ProblemT, config: ConfigT, inputs: Arrays) -> Arrays:
        """Return the whole input tensors of a config's program, by name.

        This default returns `inputs`. An algorithm overrides it if its programs have other input tensors than the
        problem, such as transposes.

        Args:
            inputs: the whole input tensors of the problem, by name, as `reference` takes them.
        """
        return inputs

    def results(self, problem: ProblemT, config: ConfigT, outputs: Arrays) -> Arrays:
        """Return the whole output tensors of the problem, by name, as `reference` returns them.

        This default returns `outputs`. An algorithm overrides it if its programs have other output tensors than
        the problem.

        Args:
            outputs: the whole output tensors of the config's program, by name.
        """
        return outputs

    def random_inputs(self, problem: ProblemT, seed: int = 0) -> dict[str, Array]:
        """Return whole input tensors of random integers from -4 to 4, by name, for the first candidate's program.

        They have the dtypes of the program's inputs, but float32 for 16-bit floats. Sums and products of a few
        thousand such integers are exact in float32, so results compare with `==`.
        """
        program = self.program(problem, next(self.candidates(problem)))
        draw = np.random.default_rng(seed)
        inputs = {}
        for buffer in program.buffers:
            if buffer.kind == "input" and buffer.tensor is not None:
                tensor = program.tensor_of[buffer.tensor]
                inputs[tensor.name] = draw.integers(-4, 5, tensor.shape).astype(number_dtype(tensor.dtype))
        return inputs
