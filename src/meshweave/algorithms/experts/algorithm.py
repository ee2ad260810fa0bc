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

    A row is one token for one of its experts; packed rows of a rank are ordered by expert, then token. How many
    rows there are depends on the routing: the program's text has tables of counts as inputs. `counted_program` is
    this program for any routing, and `program` has the counts of the problem's routing put in.

    Attributes:
        is_one_sided: whether ranks put rows into the memory of other ranks, instead of sending messages.
        shares_nics: whether all ranks of a host send messages of their own over its NICs at once.
    """

    problem_type = ExpertsProblem
    is_proved: ClassVar[bool] = False
    is_one_sided: ClassVar[bool] = False
    shares_nics: ClassVar[bool] = False

    def examples(self) -> Iterator[ExpertsProblem]:
        """Yield three layers on 2 hosts of 2 ranks each.

        Their tokens are balanced over experts, uneven with dropped ones, and all routed to one expert.
        """
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
        """Return the program for any routing as text for `parse`; the row counts of `counts` are inputs of it."""

    def counted_program(self, problem: ExpertsProblem, config: ConfigT) -> Program:
        """Return the program for any routing; the tables that `counts` returns are inputs of it.

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
        """Return the tables of row counts for a routing, by name; programs need those in their `counts_of`.

        "n0" is (experts, source ranks): the number of rows of a rank's tokens for an expert. "m" is (hosts, source
        ranks): the number of a rank's tokens that have an expert on a host.

        Args:
            choices: experts of each token, (ranks * tokens, top_k), -1 if dropped; None for the problem's own.
        """
        chosen = problem.choices if choices is None else choices
        return problem.counts_of(chosen)

    def program(self, problem: ExpertsProblem, config: ConfigT) -> Program:
        """Return the program with the row counts of the problem's own routing put in.

        Raises:
            LayoutError: `refusal` has a reason why the problem does not fit.
        """
        program, values = self.counted_program(problem, config), self.counts(problem, config)
        return program.with_counts({name: values[name] for name in program.counts_of})

    def machine(self, problem: ExpertsProblem, config: ConfigT, cluster: Cluster) -> Machine:
        """Return the cluster with the program's mesh laid on it, for `estimate`.

        If `shares_nics` is set and the cluster is a network of hosts, each chip gets an equal share of the bytes a
        second of its host's NICs, at most those of one NIC.
        """
        network = cluster.network
        if self.shares_nics and isinstance(network, HostsNetwork):
            on_a_nic = max(network.chips_per_host / network.nics_per_host, 1)
            share = network.nic.link_bytes_per_s / on_a_nic
            network = replace(network, nic=replace(network.nic, link_bytes_per_s=max(share, 1.0)))
            cluster = replace(cluster, network=network)
        return super().machine(problem, config, cluster)

    def reference(self, problem: ExpertsProblem, inputs: Arrays) -> dict[str, Array]:
        """Return the whole outputs by name, computed expert by expert in one process.

        They are Y, and for training also dX, dGates, dW1 and dW2. For a dispatch, weighted or not, the only output
        is Q0: the rows of all ranks as their experts receive them (`cells_reference`).
        """
        if problem.part in ("layer", "training"):
            return layer_reference(problem, inputs)
        return cells_reference(problem, inputs, self.source_order(problem))

    def source_order(self, problem: ExpertsProblem) -> list[int]:
        """Return the positions of all ranks on the mesh in the order in which their rows lie at an expert.

        This default returns 0, 1, 2, ...
        """
        return list(range(problem.num_ranks))

    def functions(self, problem: ExpertsProblem) -> Mapping[str, Callable[..., Any]]:
        """Return the functions that programs call, by name: packing rows, weighted sums, the activation."""
        return layer_functions(problem.activation)

    def random_inputs(self, problem: ExpertsProblem, seed: int = 0) -> dict[str, Array]:
        """Return whole inputs by name: random integers from -3 to 3, and the problem's own `Choices`.

        They have the dtypes of the inputs, but float32 for 16-bit floats. The input Z0 of a combine alone, packed
        rows, is left out.
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
        """Yield the only config: there is nothing to choose.

        `cluster` is ignored.
        """
        yield NoChoice()
