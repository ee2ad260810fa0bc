"""What the ranks of test_call_order run: calls out of order, refusals, and calls without a process group.

Each case has a context of its own: a call out of order ends that, and the default process group stays as it is.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from matmul_rank_functions import S0, S1, R, integers, placed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear

import meshweave
from meshweave.base.errors import LayoutError, MeshweaveError
from meshweave.execute.torch.bind import BoundProgram, bind
from meshweave.execute.torch.call_order import share_refusal
from meshweave.execute.torch.context import TorchContext
from meshweave.ir.program.parse import parse

DEADLINE_S = 25.0

RING = """
program("ring of SIZE")
q = mesh((NUM,), ("x",), ranks=RANKS)
X = tensor((NUM, SIZE), "float64")
x = input(X, q[S(0)])
y = output(X, q[S(0)])
net = lane()
with q:
    permute(y, x, over="q.x", lane=net, name="step")
"""

GATHER = (
    RING.replace("ring", "gather")
    .replace("y = output(X, q[S(0)])", "y = output(X, q[R])")
    .replace(
        'permute(y, x, over="q.x", lane=net, name="step")', 'all_gather(y, x, over="q.x", dim=0, lane=net)'
    )
)


class Calls:
    """Calls of many kinds in one context, each of which returns what came of it on this rank.

    `wrong_rank` gives a local part with a row too many.
    """

    def __init__(self, context: TorchContext, transport: str = "messages") -> None:
        self.context, self.transport = context, transport
        self.rank = dist.get_rank()
        self.mesh = init_device_mesh("cpu", (2, 2))
        self.wrong_rank: int | None = None
        self._bound: dict[str, BoundProgram] = {}
        self._made: dict[tuple[tuple[int, int], int, torch.dtype], DTensor] = {}

    def matmul(self, size: int = 8, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
        a = self._laid((size, size), seed, dtype=dtype, may_be_wrong=True)
        b = self._laid((size, size), 2, dtype=dtype)
        out = meshweave.matmul(a, b, (S0, S1), transport=self.transport, context=self.context)
        return out.to_local()

    def linear(self, size: int = 8) -> Tensor:
        x = self._laid((size, size), 1, may_be_wrong=True)
        weight = self._laid((size, size), 2)
        with meshweave.nn.universal_linear((S0, S1), transport=self.transport, context=self.context):
            local: Tensor = linear(x, weight).to_local()
        return local

    def matmul2d(self, size: int = 8, ring_ways: int = 1, seed: int = 1) -> Tensor:
        half = size // 2
        a, b = integers((half, half), seed + self.rank), integers((half, half), 9)
        if self.rank == self.wrong_rank:
            a = torch.cat([a, a[:1]])
        return meshweave.nn.matmul2d(
            a, b, mesh=self.mesh, shape=(size, size, size), ring_ways=ring_ways, context=self.context
        )

    def reshard(self, rows: int = 8) -> Tensor:
        x = self._laid((rows, 6), 3, may_be_wrong=True)
        return meshweave.reshard(x, self.mesh, (R, R), context=self.context).to_local()

    def state(self, rows: int = 8) -> Tensor:
        x = self._laid((rows, 6), 3, may_be_wrong=True)
        moved = meshweave.nn.reshard_state_dict({"w": x}, self.mesh, {"w": (R, R)}, context=self.context)
        local: Tensor = moved["w"].to_local()
        return local

    def program(
        self, text: str, size: int, value: float = 1, name: str = "", ranks: Sequence[int] = (0, 1, 2, 3)
    ) -> Tensor:
        """Run a bare program, bound at its first use; `name` tells two bound ones of one text apart."""
        if self.rank not in ranks:
            return torch.zeros(0)
        key = f"{name} {text} {size} {ranks}"
        if key not in self._bound:
            text = text.replace("SIZE", str(size)).replace("NUM", str(len(ranks)))
            program = parse(text.replace("RANKS", str(tuple(ranks))))
            self._bound[key] = bind(program, self.rank, {}, context=self.context)
        rows = 2 if self.rank == self.wrong_rank else 1
        self._bound[key].run({"x": torch.full((rows, size), value + self.rank, dtype=torch.float64)})
        return self._bound[key].outputs["y"].clone()

    def _laid(
        self,
        shape: tuple[int, int],
        seed: int,
        *,
        dtype: torch.dtype = torch.float64,
        may_be_wrong: bool = False,
    ) -> DTensor:
        """Return a matrix cut over both dims of the mesh, the same one at each call."""
        key = shape, seed, dtype
        if key not in self._made:
            self._made[key] = placed(integers(shape, seed, dtype), self.mesh, (S0, S1))
        laid = self._made[key]
        if not may_be_wrong or self.rank != self.wrong_rank:
            return laid
        local = torch.cat([laid.to_local(), laid.to_local()[:1]])
        return DTensor.from_local(
            local, self.mesh, (S0, S1), run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
        )


Call = Callable[[Calls], Tensor]

SWAPPED: dict[str, tuple[Call, Call]] = {
    "matmul and reshard_state_dict": (Calls.matmul, Calls.state),
    "matmul of two sizes": (Calls.matmul, lambda c: c.matmul(16)),
    "linear and reshard": (Calls.linear, Calls.reshard),
    "matmul2d of two sizes": (Calls.matmul2d, lambda c: c.matmul2d(16)),
    "matmul2d with gloo's collectives": (lambda c: c.matmul2d(8, 0), lambda c: c.matmul2d(16, 0)),
    "reshards of two sizes": (Calls.reshard, lambda c: c.reshard(12)),
    "bare programs of two sizes": (lambda c: c.program(RING, 4), lambda c: c.program(RING, 6)),
    "bare programs of one kind": (lambda c: c.program(RING, 4), lambda c: c.program(RING, 4, 9, "b")),
    "bare collectives": (lambda c: c.program(GATHER, 4), lambda c: c.program(GATHER, 6)),
    "collectives of one kind": (lambda c: c.program(GATHER, 4), lambda c: c.program(GATHER, 4, 9, "b")),
}
SWAPPED_IN_MEMORY = ("matmul and reshard_state_dict", "matmul of two sizes", "linear and reshard")
"""Those that run in shared memory, too."""

REFUSED: dict[str, Call] = {
    "matmul": Calls.matmul,
    "linear": Calls.linear,
    "matmul2d": Calls.matmul2d,
    "reshard": Calls.reshard,
    "state dict": Calls.state,
    "bare program": lambda c: c.program(GATHER, 4),
}


class FreshCalls:
    """Calls in a context of their own, which is closed at the end, when all ranks are there."""

    def __init__(self, context: Any, transport: str = "messages") -> None:
        self._context = TorchContext(liveness=context.liveness, deadline_s=DEADLINE_S)
        self._transport = transport

    def __enter__(self) -> Calls:
        dist.barrier()
        return Calls(self._context, self._transport)

    def __exit__(self, *_: object) -> None:
        dist.barrier()
        self._context.close()


def attempt(call: Callable[[], object]) -> str:
    """Return "" where a call succeeds, else its error in one line, after "late: " if it came at the deadline."""
    begin = time.monotonic()
    try:
        call()
    except MeshweaveError as error:
        late = "late: " if time.monotonic() - begin >= DEADLINE_S else ""
        return f"{late}{type(error).__name__}: {error}"
    return ""


def swapped_cases(thorough: bool) -> list[str]:
    """Return the cases of `swapped`, as "transport: names": all of them, or every fourth."""
    cases = [f"messages: {name}" for name in SWAPPED] + [f"shared: {name}" for name in SWAPPED_IN_MEMORY]
    return cases if thorough else cases[::8]


def refused_cases(thorough: bool) -> list[str]:
    """Return the cases of `refused`, as "transport: name, when": all of them, or every fifth."""
    names = [f"messages: {name}" for name in REFUSED] + ["shared: matmul", "shared: linear"]
    cases = [f"{name}, {when}" for name in names for when in ("first", "later")]
    return cases if thorough else cases[::10]


def swapped(context: Any, thorough: bool) -> dict[str, Any]:
    """Return what comes of two calls that are in order on all ranks once, and then swapped on rank 2."""
    answers: dict[str, Any] = {}
    for case in swapped_cases(thorough):
        transport, _, name = case.partition(": ")
        pair = SWAPPED[name]
        with FreshCalls(context, transport) as calls:
            expected = [call(calls) for call in pair]
            values: dict[int, Tensor] = {}

            def both(values: dict[int, Tensor] = values, pair: Any = pair, calls: Calls = calls) -> None:
                for which in (0, 1) if context.rank != 2 else (1, 0):
                    values[which] = pair[which](calls)

            said = attempt(both)
            wrong = [which for which, value in values.items() if not torch.equal(value, expected[which])]
            answers[case] = [said, wrong]
    return answers


def refused(context: Any, thorough: bool) -> dict[str, Any]:
    """Return what comes of a wrong local shape on rank 3, at the first call of a kind and at a later one."""
    answers: dict[str, Any] = {}
    for case in refused_cases(thorough):
        transport, _, rest = case.partition(": ")
        name, _, when = rest.partition(", ")
        with FreshCalls(context, transport) as calls:
            if when == "later":
                REFUSED[name](calls)
            calls.wrong_rank = 3
            answers[case] = attempt(lambda c=calls, one=REFUSED[name]: one(c))
    return answers


def first_calls(context: Any) -> dict[str, Any]:
    """Return what comes of different first calls, and of ranks that wait for each other in a circle."""
    answers: dict[str, Any] = {}
    for name, mine, others in (
        ("matmul, state dict", Calls.matmul, Calls.state),
        ("matmul, matmul2d", Calls.matmul, Calls.matmul2d),
        ("dtypes", lambda c: c.matmul(dtype=torch.float32), Calls.matmul),
    ):
        with FreshCalls(context, "auto") as calls:
            answers[name] = attempt(lambda c=calls, m=mine, o=others: (m if c.rank == 3 else o)(c))
    with FreshCalls(context) as calls:
        sets = [(0, 1), (1, 2), (0, 2)]
        for ranks in sets:
            calls.program(RING, 4, ranks=ranks)
        mine = [ranks for ranks in sets if context.rank in ranks]
        if context.rank == 1:
            mine.reverse()  # 0 is with 1, 1 is with 2, 2 is with 0
        if context.rank == 2:
            mine.reverse()

        def go(mine: Any = mine, calls: Calls = calls) -> None:
            for ranks in mine:
                calls.program(RING, 4, ranks=ranks)

        answers["circle"] = attempt(go)
    with FreshCalls(context) as calls:
        calls.program(GATHER, 4)  # in which each rank needs all
        steps = [lambda: calls.program(GATHER, 4), lambda: calls.program(RING, 6, ranks=(2, 3))]
        if context.rank == 3:
            steps.reverse()
        answers["circle with a first call"] = attempt(lambda: [step() for step in steps])
    with FreshCalls(context) as calls:
        if context.rank == 3:
            time.sleep(0.2)  # the others look where it waits, and it waits nowhere
        answers["late after a circle"] = attempt(calls.matmul)
    return answers


def dims(context: Any) -> dict[str, Any]:
    """Return what is said of dims that a tensor does not have, and what is wrong where dims are negative."""
    answers: dict[str, Any] = {}
    with FreshCalls(context) as calls:
        mesh, whole = calls.mesh, integers((8, 8), 1)
        a, b = placed(whole, mesh, (S0, S1)), placed(integers((8, 8), 2), mesh, (S0, S1))
        state = {"w": a}
        options = {"context": calls.context}
        for out in ((Shard(-3), R), (R, Shard(2))):
            name = f"{out[0]}, {out[1]}"
            answers[f"matmul {name}"] = attempt(lambda o=out: meshweave.matmul(a, b, o, **options))
            answers[f"reshard {name}"] = attempt(lambda o=out: meshweave.reshard(a, mesh, o, **options))
            answers[f"state {name}"] = attempt(
                lambda o=out: meshweave.nn.reshard_state_dict(state, mesh, {"w": o}, **options)
            )
            with meshweave.nn.universal_linear(out, **options):
                answers[f"linear {name}"] = attempt(lambda: linear(a, b))
        results = [
            meshweave.matmul(a, b, (Shard(-2), Shard(-1)), context=calls.context),
            meshweave.reshard(a, mesh, (Shard(-1), Shard(-2)), context=calls.context),
        ]
        right = [(S0, S1), (S1, S0)]
        answers["negative"] = [tuple(r.placements) == p for r, p in zip(results, right, strict=True)]
    return answers


def inference(context: Any) -> list[str]:
    """Return what is wrong where a kind of call is first met under inference mode, and trained with later."""
    wrong: list[str] = []
    for transport in ("messages", "shared"):
        for name, call in (REFUSED | {"ring": lambda c: c.program(RING, 4)}).items():
            if transport == "shared" and name not in ("matmul", "linear"):
                continue
            with FreshCalls(context, transport) as calls:
                with torch.inference_mode():
                    inside = call(calls)
                for is_inside in (False, True, False):
                    with torch.inference_mode(is_inside):
                        if not torch.equal(call(calls), inside):
                            wrong.append(f"{transport}: {name}, inside {is_inside}")
                _train(calls, wrong)
    wrong += _given_in_inference_mode(context)
    return wrong


def _train(calls: Calls, wrong: list[str]) -> None:
    """Take gradients by all that is differentiable, in a context in which inference came first."""
    mesh, options = calls.mesh, {"context": calls.context}
    weight = placed(integers((8, 8), 2), mesh, (S0, S1)).requires_grad_()
    x = placed(integers((8, 8), 1), mesh, (S0, S1)).requires_grad_()
    y = meshweave.matmul(x, weight, (S0, S1), transport=calls.transport, **options)
    meshweave.reshard(y, mesh, (S1, S0), **options).sum().backward()
    expected = integers((8, 8), 1).t() @ torch.ones(8, 8, dtype=torch.float64)
    if not torch.equal(weight.grad.full_tensor(), expected):
        wrong.append("gradient of matmul and reshard")
    local = torch.ones(4, 4, requires_grad=True)
    meshweave.nn.matmul2d(local, local.detach(), mesh=mesh, shape=(8, 8, 8), **options).sum().backward()
    if not bool((local.grad == 8).all()):
        wrong.append("gradient of matmul2d")


def _given_in_inference_mode(context: Any) -> list[str]:
    """Bind a program to tensors that were made under inference mode, and run it outside."""
    text = RING.replace("SIZE", "4").replace("NUM", "4").replace("RANKS", "(0, 1, 2, 3)")
    with FreshCalls(context) as calls:
        with torch.inference_mode():
            x, y = (torch.zeros(1, 4, dtype=torch.float64) for _ in range(2))
            bound = bind(parse(text), calls.rank, {"x": x, "y": y}, context=calls.context)
            bound.run()
        bound.run({"x": torch.full((1, 4), 5.0, dtype=torch.float64)})
        tensors = [*bound.inputs.values(), *bound.outputs.values()]
        held = [tensor for tensor in tensors if tensor.is_inference()]
        return ["bound to inference tensors"] * bool(held) + ["given memory is not used"] * (
            not bool((y == 5).all())
        )


def failed_groups(context: Any) -> dict[str, str]:
    """Return what is said where rank 3 refuses a call, and torch or the caller's own code fails on the others."""
    fails = {"torch": lambda: dist.new_group([0, 99]), "own": lambda: int("own")}
    answers = {}
    for name, fail in fails.items():
        with FreshCalls(context) as calls:
            calls.matmul()

            def call(calls: Calls = calls, fail: Callable[[], object] = fail) -> None:
                with share_refusal(calls.context, range(context.num_ranks), "dispatch"):
                    if context.rank == 3:
                        raise LayoutError("no such dim")
                    time.sleep(0.3)
                    fail()

            try:
                call()
            except (MeshweaveError, ValueError) as error:
                answers[name] = f"{type(error).__name__}: {error}"
            dist.barrier()
    return answers


def cases(context: Any, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return what comes of each of the payload's cases, functions of this module."""
    sampled = {"swapped": swapped, "refused": refused}
    return {
        name: sampled[name](context, payload["thorough"]) if name in sampled else globals()[name](context)
        for name in payload["cases"]
    }


# --- no process group -------------------------------------------------------------------------------------------


def without_group(context: Any) -> dict[str, Any]:
    """Return what is said of calls after `destroy_process_group`, and in the old context in a new group.

    What comes later in this process has the new group.
    """
    old = TorchContext(deadline_s=DEADLINE_S)
    calls = {"old context": Calls(old), "default context": Calls(None)}
    for each in calls.values():
        for call in REFUSED.values():
            call(each)
    dist.destroy_process_group()
    answers = {}
    for name, each in calls.items():
        for what, call in REFUSED.items():
            answers[f"{name}, {what}"] = attempt(lambda c=each, one=call: one(c))
    again = dist.PrefixStore("again", context.store)
    dist.init_process_group("gloo", store=again, rank=context.rank, world_size=context.num_ranks)
    kept = Calls(old)
    answers["old context in a new group"] = attempt(kept.matmul)
    answers["new context"] = attempt(Calls(TorchContext(deadline_s=DEADLINE_S)).matmul)
    answers["default context in a new group"] = attempt(Calls(None).matmul)
    dist.barrier()
    return answers


# --- by lot -----------------------------------------------------------------------------------------------------

BY_LOT: dict[str, Call] = {
    **{f"matmul {size}": lambda c, size=size: c.matmul(size) for size in (8, 12, 16)},
    "matmul of other dtype": lambda c: c.matmul(dtype=torch.float32),
    "linear": Calls.linear,
    **{f"matmul2d {size}": lambda c, size=size: c.matmul2d(size) for size in (8, 16)},
    "matmul2d by collectives": lambda c: c.matmul2d(8, 0),
    **{f"reshard {rows}": lambda c, rows=rows: c.reshard(rows) for rows in (8, 12)},
    **{f"state {rows}": lambda c, rows=rows: c.state(rows) for rows in (8, 12)},
    **{f"ring {size}": lambda c, size=size: c.program(RING, size) for size in (4, 6)},
    "another ring 4": lambda c: c.program(RING, 4, 9, "b"),
    "gather": lambda c: c.program(GATHER, 4),
    "another gather": lambda c: c.program(GATHER, 4, 9, "b"),
    "ring of two": lambda c: c.program(RING, 4, ranks=(1, 2)),
}
TWINS = ("ring 4", "another ring 4", "gather", "another gather")
"""Programs of one text. Where a rank binds one and the others its twin, first of all, nothing tells them apart."""

FAULTS = ("none", "swap", "skip", "repeat", "other kind", "wrong shape")


def by_lot(context: Any, payload: Mapping[str, Any]) -> list[list[Any]]:
    """Run random sequences of calls with a random fault on one rank; each ends with a call that needs all ranks.

    Returns a row per sequence: what was done, the errors of this rank, the calls whose result was not that of the
    same call alone.
    """
    rows = []
    for number in range(payload["count"]):
        lots = random.Random(f"{payload['seed']} {number}")
        names = [lots.choice(list(BY_LOT)) for _ in range(lots.randint(3, 7))]
        fault, culprit, at = lots.choice(FAULTS), lots.randrange(4), lots.randrange(len(names) - 1)
        transport, warm = lots.choice(["messages", "shared", "auto"]), lots.random() < 0.7
        done = list(names)
        if context.rank == culprit:
            _spoil(done, fault, at, lots)
        with FreshCalls(context, transport) as calls:
            expected = {name: BY_LOT[name](calls) for name in dict.fromkeys(names)}
        with FreshCalls(context, transport) as calls:
            for name in dict.fromkeys(names) if warm else ():
                BY_LOT[name](calls)
            said, wrong = "", []
            for place, name in enumerate([*done, "end"]):
                calls.wrong_rank = culprit if fault == "wrong shape" and place == at else None
                try:
                    value = BY_LOT[name](calls) if name != "end" else calls.program(GATHER, 10)
                except MeshweaveError as error:
                    said = f"{type(error).__name__}: {error}"
                    break
                is_told_apart = warm or fault == "none" or name not in TWINS
                if is_told_apart and name in expected and not torch.equal(value, expected[name]):
                    wrong.append(name)
        plan = f"{fault} on {culprit} at {at} of {names}, {transport}, {'warm' if warm else 'cold'}"
        rows.append([plan, said, wrong])
    return rows


def _spoil(names: list[str], fault: str, at: int, lots: random.Random) -> None:
    if fault == "swap":
        names[at], names[at + 1] = names[at + 1], names[at]
    elif fault == "skip":
        del names[at]
    elif fault == "repeat":
        names.insert(at, names[at])
    elif fault == "other kind":
        names[at] = lots.choice([name for name in BY_LOT if name != names[at]])
