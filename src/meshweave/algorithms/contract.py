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
    """Return the accuracy of a number that is off by at most `share` (0 to 1) of the true value."""
    return Within(share)


Accuracy = Literal["exact", "upper_bound"] | Within
"""How a closed form compares with the program. "exact": equal, to the picosecond; "upper_bound": never less."""


def is_accurate(accuracy: Accuracy, claimed: float, true: float, rounding: float = 0.0) -> bool:
    """Return whether a closed form's value `claimed` is to the value `true` as `accuracy` says.

    "exact" means equal, "upper_bound" no less than `true`, and `within(share)` off by at most that share of
    `true`; each to within `rounding`. The three numbers are in one unit.
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
    """Return the numpy dtype of inputs and references for tensors of `dtype`: float32 for 16-bit floats."""
    return "float32" if dtype in ("bfloat16", "float16") else dtype


class Algorithm(ABC, Generic[ProblemT, ConfigT]):
    """An algorithm for problems of type `problem_type`. The table holds one instance of each subclass.

    Attributes:
        name: the key in the table, as on the command line.
        title: the name in tables and pictures.
        source: where the algorithm is published.
        problem_type: the type of its problems; algorithms of one type compete with each other.
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
        """Return the program of a config.

        Raises:
            LayoutError: the config does not fit the problem.
            UnsupportedError: the config has closed forms, and no program is written for it.
        """

    @abstractmethod
    def reference(self, problem: ProblemT, inputs: Arrays) -> dict[str, Array]:
        """Return the output tensors by name, computed without sharding in numpy from whole input tensors."""

    def placements(self, problem: ProblemT) -> dict[str, Layout]:
        """Return the layout of every input and output tensor, by name.

        This default writes the program of the first config. Algorithms override it where the layouts follow from
        the problem.
        """
        buffers = self.program(problem, next(iter(self.candidates(problem)))).buffers
        placed = ((b.tensor, b.layout) for b in buffers if b.kind in ("input", "output"))
        return {name: layout for name, layout in placed if name is not None and layout is not None}

    def estimate(self, problem: ProblemT, config: ConfigT, machine: Machine) -> Estimate:
        """Return the time of a config on a machine without contention: that of its program, and `outside_s`.

        This default writes the program and steps through its ops. Algorithms with many configs override it with a
        closed form.
        """
        return estimate(self.program(problem, config), machine)

    def machine(self, problem: ProblemT, config: ConfigT, cluster: Cluster) -> Machine:
        """Return the cluster with the meshes of a config's program laid on it, on which `estimate` prices it.

        A mesh that is no part of a torus becomes a logical mesh, whose neighbours may be several hops apart.
        """
        return Machine.of(cluster, self.program(problem, config), logical=True)

    def branches(
        self, problem: ProblemT, part: Any = None, limit_s: float = math.inf
    ) -> Iterator[Any] | None:
        """Return the parts or configs into which a branch-and-bound search divides a part of the candidates.

        Returns None for a config. This default returns None for `part` None, too: nothing is searched, and all
        of `candidates` are priced one by one. An algorithm with too many for that overrides this and
        `lower_bound`.

        Args:
            part: a part that `branches` yielded; None for all candidates. The search finishes each part that
                is yielded for None before it starts the next; within such a part it goes best bound first.
            limit_s: candidates that take this many seconds or more cannot change the result, and may be left
                out.
        """
        return None

    def lower_bound(self, problem: ProblemT, part: Any, *, is_tight: bool = False) -> float:
        """Return seconds that no config of a part takes less than; this default returns 0.

        Args:
            part: what `branches` yielded: a part of the candidates, or a config.
            is_tight: whether a higher bound is wanted, which may take longer to compute. A search asks for it
                only for the parts that it begins with, not their branches: for each when its bound is the least.
        """
        return 0.0

    def row(self, problem: ProblemT, part: Any) -> Hashable:
        """Return a key that configs of one row of a ranking have in common; a row shows only its best config.

        Args:
            part: a config, or a part that `branches` yielded. This default returns it, so that each config has a
                row of its own.
        """
        own: Hashable = part
        return own

    def admits(self, problem: ProblemT, config: ConfigT) -> bool:
        """Return whether a config may be chosen; this default returns True.

        A search asks before it prices a config, but not where a bound has ruled it out already.
        """
        return True

    def preference(self, problem: ProblemT, config: ConfigT, estimate: Estimate) -> Any:
        """Return what decides between configs that take equally long: the config with the smaller value wins.

        This default is the same for all, so that the first one wins.
        """
        return 0

    def outside_s(self, problem: ProblemT, config: ConfigT) -> float:
        """Return the seconds of `estimate` that no op of the program takes, such as logging; 0 by default."""
        return 0.0

    def refusal(self, problem: ProblemT) -> str | None:
        """Return why the algorithm cannot solve a problem of its type, in a few words; None if it can."""
        return None

    def traffic(self, problem: ProblemT, config: ConfigT, rank: int) -> dict[str, int]:
        """Return the logical bytes that a rank moves, by mesh axis ("tp.row") or mesh ("tp").

        "" has those of messages, of one-sided ops, and of groups of ranks that are no mesh or mesh axis. What is
        received counts in an all-gather, broadcast, recv, get and permute; what is sent in a reduce-scatter,
        reduce, put, accumulate and all-to-all; both halves of an all-reduce (`ir.work.bytes_moved`).
        """
        return traffic(self.program(problem, config), rank)

    def peak_bytes(self, problem: ProblemT, config: ConfigT, rank: int = 0) -> int:
        """Return the most bytes that a global rank holds at once, operands and results included."""
        return peak_bytes(self.program(problem, config), rank)

    def gradients(self, problem: ProblemT) -> tuple[Gradient[Any], ...]:
        """Return for each differentiable input the problem of its gradient; this default returns none.

        An input is left out where the placements of the operands do not fit the problem of its gradient.
        """
        return ()

    def functions(self, problem: ProblemT) -> Mapping[str, Callable[..., Any]]:
        """Return the functions that the program's `call` ops compute on arrays, by the name in the op.

        Each is called with the op's input arrays and then its args, and returns its outputs (`execute.calls`).
        This default is for programs without calls: it returns none.
        """
        return {}

    def calls(self, problem: ProblemT, config: ConfigT) -> Mapping[str, Callable[..., Any]]:
        """Return `functions` for one config; an algorithm overrides it if they depend on the config."""
        return self.functions(problem)

    def operands(self, problem: ProblemT, config: ConfigT, inputs: Arrays) -> Arrays:
        """Return the whole input tensors of a config's program, by name, made of those that `reference` takes.

        This default returns `inputs`. An algorithm overrides it if its programs have other input tensors.
        """
        return inputs

    def results(self, problem: ProblemT, config: ConfigT, outputs: Arrays) -> Arrays:
        """Return whole outputs as `reference` returns them, by name, made of those of a config's program.

        This default returns `outputs`. An algorithm overrides it if its programs have other output tensors.
        """
        return outputs

    def random_inputs(self, problem: ProblemT, seed: int = 0) -> dict[str, Array]:
        """Return random integers from -4 to 4 for every input tensor, in its dtype (float32 for 16-bit floats).

        Sums and products of a few thousand of them are exact in float32, so results compare with `==`. The
        tensors are those of the program of the first candidate.
        """
        program = self.program(problem, next(self.candidates(problem)))
        draw = np.random.default_rng(seed)
        inputs = {}
        for buffer in program.buffers:
            if buffer.kind == "input" and buffer.tensor is not None:
                tensor = program.tensor_of[buffer.tensor]
                inputs[tensor.name] = draw.integers(-4, 5, tensor.shape).astype(number_dtype(tensor.dtype))
        return inputs
