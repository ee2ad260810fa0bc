"""The base of algorithms for a layer of experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Generic

import numpy as np

from meshweave.algorithms.contract import Algorithm, Array, Arrays, ConfigT, number_dtype
from meshweave.algorithms.experts.functions import layer_functions
from meshweave.algorithms.experts.layer import output_names, plain_tensors
from meshweave.algorithms.experts.problem import ExpertsProblem
from meshweave.algorithms.experts.reference import cells_reference, layer_reference
from meshweave.algorithms.experts.routing import Routing
from meshweave.algorithms.fused.product import NoChoice
from meshweave.base.errors import LayoutError
from meshweave.cost.machine import Machine
from meshweave.describe.layout.mesh import Mesh
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.network import HostsNetwork
from meshweave.ir.program import Program
from meshweave.ir.program.parse import parse


class ExpertsAlgorithm(Algorithm[ExpertsProblem, ConfigT], Generic[ConfigT]):
    """An algorithm for a mixture-of-experts layer.

    `counted_program` is the program for all routings, `program` that of the routing of the problem.
    `validate` proves the first; packing has no equation, so a run is compared with the reference.

    Attributes:
        is_one_sided: whether ranks put rows into the memory of other ranks, instead of sending messages.
        shares_nics: whether all ranks of a host send messages of their own over its NICs at once.
    """

    problem_type = ExpertsProblem
    is_proved: ClassVar[bool] = False
    is_one_sided: ClassVar[bool] = False
    shares_nics: ClassVar[bool] = False

    def examples(self) -> Iterator[ExpertsProblem]:
        """Yield layers on 2 hosts of 2 ranks: balanced, uneven with dropped tokens, all tokens to one expert."""
        mesh = Mesh.of("ep", (2, 2), ("host", "local"))
        exact: dict[str, Any] = {"dtype": "float64", "activation": "relu"}
        yield ExpertsProblem(mesh, 6, 2, 8, 4, 3, **exact)
        yield ExpertsProblem(
            mesh, 5, 3, 4, 3, 2, part="training", capacity=3, routing=Routing("power", 1, 1.5), **exact
        )
        one = Routing("table", 2, table=(0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0))
        yield ExpertsProblem(mesh, 4, 1, 8, 3, 2, part="training", routing=one, **exact)

    @abstractmethod
    def text(self, problem: ExpertsProblem, config: ConfigT) -> str:
        """Return the program as text, for any routing: the numbers of rows are inputs (`counts`)."""

    def counted_program(self, problem: ExpertsProblem, config: ConfigT) -> Program:
        """Return the program for any routing, whose inputs are also the numbers of rows (`counts`).

        Raises:
            LayoutError: `refusal` has a reason why the problem does not fit.
        """
        refusal = self.refusal(problem)
        if refusal is not None:
            raise LayoutError(f"{self.title}: {refusal}")
        return parse(self.text(problem, config))

    def counts(
        self, problem: ExpertsProblem, config: ConfigT, choices: Array | None = None
    ) -> dict[str, Array]:
        """Return numbers of rows by name, of which a program takes those in its `counts_of` as inputs.

        "n0" is (experts, source ranks): the rows of a rank for an expert. "m" is (hosts, source ranks): the
        tokens of a rank that have an expert on a host.

        Args:
            choices: experts of each token, (ranks * tokens, top_k), -1 if dropped; None for the problem's own.
        """
        chosen = problem.choices if choices is None else choices
        return problem.counts_of(chosen)

    def program(self, problem: ExpertsProblem, config: ConfigT) -> Program:
        """Return the program with the numbers of rows of the problem's routing put in.

        Raises LayoutError where `refusal` has a reason.
        """
        program, values = self.counted_program(problem, config), self.counts(problem, config)
        return program.with_counts({name: values[name] for name in program.counts_of})

    def machine(self, problem: ExpertsProblem, config: ConfigT, cluster: Cluster) -> Machine:
        """Return the cluster with the program's mesh on it, on which `estimate` prices it.

        With `shares_nics`, on a network of hosts, each chip has an equal share of the rate of its host's NICs,
        at most that of one NIC.
        """
        network = cluster.network
        if self.shares_nics and isinstance(network, HostsNetwork):
            on_a_nic = max(network.chips_per_host / network.nics_per_host, 1)
            share = network.nic.link_bytes_per_s / on_a_nic
            network = replace(network, nic=replace(network.nic, link_bytes_per_s=max(share, 1.0)))
            cluster = replace(cluster, network=network)
        return super().machine(problem, config, cluster)

    def reference(self, problem: ExpertsProblem, inputs: Arrays) -> dict[str, Array]:
        """Return the outputs by name, whole, computed expert by expert without sharding.

        They are Y, for training also dX, dGates, dW1 and dW2; for a dispatch, weighted or not, instead Q0, the
        packed rows of all ranks (`cells_reference`).
        """
        if problem.part in ("layer", "training"):
            return layer_reference(problem, inputs)
        return cells_reference(problem, inputs, self.source_order(problem))

    def source_order(self, problem: ExpertsProblem) -> list[int]:
        """Return the source ranks, positions on the mesh, in the order in which their rows lie at an expert."""
        return list(range(problem.num_ranks))

    def functions(self, problem: ExpertsProblem) -> Mapping[str, Callable[..., Any]]:
        """Return the functions that its programs call, by name: packing rows, weighted sums, the activation."""
        return layer_functions(problem.activation)

    def random_inputs(self, problem: ExpertsProblem, seed: int = 0) -> dict[str, Array]:
        """Return inputs by name, in global shapes: random integers from -3 to 3, and the problem's choices.

        Those of 16-bit floats are float32. Packed rows, the input `Z0` of a combine alone, are left out.
        """
        draw = np.random.default_rng(seed)
        inputs: dict[str, Array] = {}
        for name, (shape, dtype) in plain_tensors(problem).items():
            if name == "Choices":
                inputs[name] = problem.choices
            elif name not in output_names(problem):
                inputs[name] = draw.integers(-3, 4, shape).astype(number_dtype(dtype))
        return inputs


class UnchosenExperts(ExpertsAlgorithm[NoChoice]):
    """An algorithm with a single config, `NoChoice`."""

    def candidates(self, problem: ExpertsProblem, cluster: Cluster | None = None) -> Iterator[NoChoice]:
        """Yield the only config: there is nothing to choose."""
        yield NoChoice()
