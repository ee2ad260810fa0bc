"""AlpaComm's microbenchmarks (MLSys '23, sections 5.1 and 5.3.1), each planned and simulated once.

The rivals' senders are balanced as the paper's are (section 5.1.2). "All-gather" is what the paper calls Alpa: all
receivers of a task are sent a part each and gather the rest, so within one host it is the local one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from math import prod

from meshweave.algorithms.reshard import ReshardPlan, plan_reshard, reshard_program, unit_tasks
from meshweave.algorithms.reshard.order import ORDERS
from meshweave.base.errors import UnsupportedError
from meshweave.base.units import dtype_bytes
from meshweave.cost.fabric import HostTopology
from meshweave.cost.machine import Machine
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.network import HostsNetwork
from meshweave.simulate import simulate
from meshweave_studies.alpacomm.alpa import alpa_program
from meshweave_studies.alpacomm.cases import CASES, DTYPE, ReshardingCase, one_to_many
from meshweave_studies.alpacomm.readings import Rivals
from meshweave_studies.alpacomm.training import TrainingStudy

HOSTS = 5
"""The most of one problem: one sends to four, and two to three."""
CHIPS = 4
GPUS = (1, 2, 3, 4)
"""Receiving GPUs of one host, figure 5 (a)."""
RECEIVING_HOSTS = (1, 2, 3, 4)
"""Receiving hosts, figure 5 (b)."""
GPUS_PER_HOST = 2
BROADCAST, ALL_GATHER, LOCAL, SEND_RECV = "broadcast", "global_all_gather", "local_all_gather", "send_recv"
STRATEGIES = (SEND_RECV, ALL_GATHER, LOCAL, BROADCAST)
WHOLE = 1 << 40
"""Bytes that no message reaches: nothing is cut to save memory, as in the paper's formulas. (With the planner's
default an all-gather goes in rounds of 64 MiB, and is slower for it.)"""
RIVAL_ORDER, OWN_ORDER, NAIVE, IN_ORDER, EXACT = "balance", "best", "naive", "in_order", "exact"


@dataclass(frozen=True)
class SimulatedReshard:
    """Times of one resharding.

    Attributes:
        seconds: the simulated time.
        predicted_s: the time by the planner's model.
        bound_s: the bound that no plan beats.
        tasks: the number of unit tasks.
        chunks: the messages of the task that is sent in the most messages.
    """

    seconds: float
    predicted_s: float
    bound_s: float
    tasks: int
    chunks: int


def orders() -> tuple[str, ...]:
    """Return the orders of figure 8 that are available.

    Order "in_order" is there if the planner knows it, "exact" if OR-tools is installed.
    """
    wanted = [NAIVE, IN_ORDER, RIVAL_ORDER, OWN_ORDER]
    if find_spec("ortools") is not None:
        wanted.append(EXACT)
    return tuple(name for name in wanted if name in ORDERS)


@dataclass
class AlpaCommStudy:
    """The paper's microbenchmarks on one cluster, each simulated once.

    Raises UnsupportedError where the hosts do not have four chips at least and one NIC, as the paper assumes.

    Attributes:
        cluster: five hosts of the given cluster.
        rivals: where send/recv and the all-gather come from.
        advance: called after every simulation.
    """

    cluster: Cluster
    advance: Callable[[], None] = lambda: None
    rivals: Rivals = "planned"
    _known: dict[tuple[ReshardingCase, str, str], SimulatedReshard] = field(default_factory=dict)

    def __post_init__(self) -> None:
        network = self.cluster.network
        if (
            not isinstance(network, HostsNetwork)
            or network.chips_per_host < CHIPS
            or network.nics_per_host != 1
        ):
            raise UnsupportedError(
                f"{self.cluster.name}: AlpaComm's experiments need hosts of {CHIPS} chips at least with one NIC "
                'each; give a cluster whose network has kind = "hosts"'
            )
        self.chips_per_host = network.chips_per_host
        self.cluster = self.cluster.with_chips(HOSTS * network.chips_per_host)

    @cached_property
    def network(self) -> HostTopology:
        """The network of the five hosts, as the resharding planner takes it."""
        return HostTopology.of(self.cluster)

    def simulate_case(self, case: ReshardingCase, strategy: str, order: str) -> SimulatedReshard:
        """Return a resharding by a strategy in an order, planned and simulated once.

        Rivals of Alpa's public code have an order of their own; prediction and bound are those of the plan.
        """
        is_public = self.rivals == "public" and strategy in (ALL_GATHER, SEND_RECV)
        key = case, strategy, RIVAL_ORDER if is_public else order
        if key not in self._known:
            plan = self._plan(case, *key[1:])
            if is_public:
                program = alpa_program(plan.problem, gathers=strategy == ALL_GATHER)
            else:
                program = reshard_program(plan)
            seconds = simulate(program, Machine.of(self.cluster, program)).duration_s
            chunks = max(multicast.chunks for multicast in plan.multicasts)
            self._known[key] = SimulatedReshard(
                seconds, plan.predicted_s, plan.bound_s, len(plan.tasks), chunks
            )
            self.advance()
        return self._known[key]

    def _plan(self, case: ReshardingCase, strategy: str, order: str) -> ReshardPlan:
        problem = case.problem(chips_per_host=self.chips_per_host)
        return plan_reshard(problem, self.network, strategy=strategy, order=order, message_bytes=WHOLE)

    @cached_property
    def training(self) -> TrainingStudy:
        """The end-to-end runs, on two of the hosts."""
        return TrainingStudy(self.cluster, self.advance)

    # --- figure 5 ---------------------------------------------------------------------------------

    def one_to_many(self, strategy: str, hosts: int, gpus: int) -> SimulatedReshard:
        """Simulate 1 GB from one device to `gpus` of each of `hosts` hosts (figure 5)."""
        return self.simulate_case(one_to_many(hosts, gpus), strategy, self.order_of(strategy))

    def closed_form(self, strategy: str, hosts: int, gpus: int) -> float:
        """Return the seconds of `one_to_many` by the formulas of `algorithms.reshard.multicast`.

        Transfers inside a host take no time in them.

        The all-gather's formula is t + t (n - 1) / n for n receivers in several hosts: its ring enters a host
        with every part but the one of the rank that it enters at.
        """
        t = self.bound_s(hosts, gpus)
        chunks = self.one_to_many(BROADCAST, hosts, gpus).chunks
        count = hosts * gpus
        return {
            SEND_RECV: count * t,
            LOCAL: hosts * t,
            ALL_GATHER: t + t * (count - 1) / count if hosts > 1 else t,
            BROADCAST: t * (chunks + hosts - 1) / chunks,
        }[strategy]

    def bound_s(self, hosts: int, gpus: int) -> float:
        """Return t in seconds: the tensor's bytes over the rate of a NIC."""
        return prod(one_to_many(hosts, gpus).shape) * dtype_bytes(DTYPE) / self.network.nic_bytes_per_s

    # --- figures 6 and 8 --------------------------------------------------------------------------

    def case(self, number: int, strategy: str = BROADCAST, order: str | None = None) -> SimulatedReshard:
        """Simulate a case of table 2. Without `order`, tasks go in the paper's order for the strategy."""
        return self.simulate_case(CASES[number], strategy, order or self.order_of(strategy))

    @staticmethod
    def order_of(strategy: str) -> str:
        """Return the order in which the paper schedules a strategy: its own for broadcasts, else the balanced
        one.
        """
        return OWN_ORDER if strategy == BROADCAST else RIVAL_ORDER

    def over_gather(self, number: int) -> float:
        """Return how many times as long the all-gather takes as the broadcast in a case of table 2."""
        return self.case(number, ALL_GATHER).seconds / self.case(number).seconds

    def over_best(self, number: int, order: str) -> float:
        """Return how many times as long the broadcast of a case takes in an order as in the best order."""
        return self.case(number, BROADCAST, order).seconds / self.case(number).seconds

    def most_by_order(self, number: int) -> float:
        """Return the largest gain by order and balance, as a ratio: the time of all tasks of a case one after
        another over the bound of the NICs.
        """
        naive = self.case(number, BROADCAST, NAIVE)
        return naive.predicted_s / naive.bound_s

    def most_by_broadcast(self, number: int) -> float:
        """Return the time of a case's all-gather over that of its broadcast, both by the planner's formulas."""
        return self.case(number, ALL_GATHER).predicted_s / self.case(number).predicted_s

    @staticmethod
    def uneven(number: int) -> bool:
        """Return whether some unit task of a case cannot be cut into equal parts for its receivers."""
        tasks = unit_tasks(CASES[number].problem())
        return any(prod(piece.shape) % len(task.destinations) for task in tasks for piece in task.pieces)

    @property
    def naive_order(self) -> str:
        """The order that stands for the paper's naive algorithm.

        The paper does not say that hosts wait for one another in its global order: `in_order`, where the planner
        knows it.
        """
        return IN_ORDER if IN_ORDER in ORDERS else NAIVE
