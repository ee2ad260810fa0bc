"""CUDA symmetric memory: a remote view is a tensor on this device, a get is one copy by this device's kernels.

Ranks are processes of one host. Where streams can wait for words in memory (`stream_window`), fences, flags and
sums are queued on streams, and the host waits once a run. Elsewhere fences, flags and locks of updates are those
of `shared` memory, on the host, each after the stream that it stands in has been waited for. Either way every
wait has its deadline and names the rank that it waits for. Several ranks share a device where
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES is 1.

With waits on the host it has run with ranks that share one GPU, and not between GPUs; with waits of streams it
has not run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from meshweave.base.errors import UnsupportedError
from meshweave.execute.cuda.trigger import StreamWords, lacks_stream_words
from meshweave.execute.memory.base import SIGNALS, ExposedSlots, Exposure, RemoteMemory, RemoteSlot, Window
from meshweave.execute.memory.mapped import MappedWindow
from meshweave.execute.memory.pool import Segment
from meshweave.execute.memory.shared import SharedMemory
from meshweave.execute.memory.stream_window import DeviceQueue, StreamWindow, with_words
from meshweave.execute.torch import compat
from meshweave.execute.torch.context import TorchContext
from meshweave.execute.torch.views import Action

_BEYOND = 1 << 40  # where the locks of device memory begin in a file of the host's that is never so large


@dataclass
class SymmetricMemory(RemoteMemory):
    """A pool of CUDA symmetric memory; see the module docstring.

    A program's memory returns to the pool once the bound program is gone, even if tensors in it are still used:
    copy results that are to outlive the program.
    """

    kind: ClassVar[str] = "symmetric"

    host: SharedMemory | None = None
    queue: DeviceQueue | None = None
    """What streams wait by; None where the host waits."""
    _tensors: dict[tuple[tuple[int, ...], int], tuple[Tensor, Any]] = field(default_factory=dict)
    _name_of: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    _groups: dict[tuple[int, ...], Any] = field(default_factory=dict)
    _reached: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _taken: list[tuple[Segment, int, int]] = field(default_factory=list)
    _signals: Window | None = None

    @classmethod
    def open(cls, context: TorchContext, pool_bytes: int) -> Self:
        """Open a pool of CUDA symmetric memory. Collective over all ranks of the context.

        Args:
            pool_bytes: bytes that each rank sets aside at its first program, not in this call; the pool grows
                where they are too few.

        Raises:
            UnsupportedError: the context's tensors are not on CUDA, there is no device or no process group,
                torch has no symmetric memory, or the ranks are on several hosts.
            BindError: it failed on another rank, or ranks are in different calls.
            RankLostError, DeadlineError: another rank died, or did not come in time.
        """
        if context.device.type != "cuda":
            raise UnsupportedError(
                f"symmetric memory needs CUDA, this context's tensors are on {context.device}"
            )
        if not torch.cuda.is_available():
            raise UnsupportedError("symmetric memory needs CUDA, and there is no device")
        if not context.is_distributed:
            raise UnsupportedError("symmetric memory needs a process group: initialise torch.distributed")
        compat.symmetric_memory()
        host = SharedMemory.open(context, 1 << 16)
        _, lacking = host.together(
            range(host.num_ranks), "all ranks to say whether their streams wait", lacks_stream_waits
        )
        queue = None
        if not any(lacking.values()):
            queue = DeviceQueue(context.device, StreamWords(context.device))
        return cls(context, host.rank, host.num_ranks, pool_bytes, host=host, queue=queue)

    def expose(self, exposure: Exposure) -> Window:
        """Set a program's slots aside, map other ranks' slots, return its window. Collective in exposure.ranks.

        The window's fences and flags are counters in host memory; where streams can wait, words in device memory.

        Raises:
            BindError: the memory is closed, some rank has too little, or cannot reach another's.
            RankLostError, DeadlineError: another rank died, or did not come in time.
        """
        assert self.host is not None
        self._signals = self.host.expose(replace(exposure, wanted={}, given={}))
        if self.queue is not None:
            exposure = with_words(exposure)
        with torch.cuda.device(self.context.device):
            window = super().expose(exposure)
        torch.cuda.synchronize(self.context.device)
        return window

    def _address(self, number: int) -> int:
        return int(self._tensors[self._name_of[number]][0].data_ptr())

    def close(self) -> None:
        """Close this rank's pool; not collective. Its programs run no more."""
        if not self.is_closed:
            self.is_closed = True
            assert self.host is not None
            self.host.close()
            self._reached.clear()
            self._tensors.clear()
            self._taken.clear()

    def _room(self, size: int, ranks: Sequence[int], what: str) -> tuple[Segment, int]:
        ranks = tuple(ranks)

        def grow(room: int) -> Segment:
            symmetric = compat.symmetric_memory()
            name = ranks, sum(1 for others, _ in self._tensors if others == ranks)
            with self.context.guard(f"{what} to share device memory", ranks):
                if ranks not in self._groups:
                    whole = len(ranks) == self.num_ranks
                    self._groups[ranks] = (
                        dist.group.WORLD
                        if whole
                        else dist.new_group(list(ranks), use_local_synchronization=True)
                    )
                tensor = symmetric.empty(room, dtype=torch.uint8, device=self.context.device)
                self._tensors[name] = tensor, symmetric.rendezvous(tensor, self._groups[ranks])
            segment = self.add_segment(room, ranks)
            self._name_of[segment.number] = name
            return segment

        return self.room_or_grow(size, ranks, what, grow)

    def _block(self, segment: Segment, offset: int, size: int) -> Tensor:
        self._taken.append((segment, offset, size))
        whole: Tensor = self._tensors[self._name_of[segment.number]][0]
        return whole[offset : offset + size]

    def _handle(self, segment: Segment) -> Any:
        return self._name_of[segment.number]

    def _attach(self, rank: int, number: int, handle: Any, ranks: Sequence[int]) -> None:
        if rank != self.rank and (rank, number) not in self._reached:
            members, count = tuple(handle[0]), handle[1]
            tensor, shared = self._tensors[members, count]
            self._reached[rank, number] = shared.get_buffer(
                members.index(rank), (tensor.numel(),), torch.uint8
            )

    def _bytes_of(self, rank: int, number: int) -> Tensor:
        return self._reached[rank, number]

    def _window(self, slots: ExposedSlots) -> Window:
        assert self._signals is not None
        window: Window = _SymmetricWindow(**vars(slots), memory=self, host=self._signals)
        if self.queue is not None:
            window = StreamWindow(**vars(slots), context=self.context, queue=self.queue, other_updates=window)
        for segment, offset, size in self._taken:
            weakref.finalize(window, segment.give_back, offset, size)
        self._taken.clear()
        return window

    def finish_writes(self) -> None:
        """Block the host until all that is queued on the context's CUDA device is done."""
        torch.cuda.synchronize(self.context.device)

    def wait_for_stream(self) -> None:
        """Block the host until all that is queued on the device's current stream is done."""
        torch.cuda.current_stream(self.context.device).synchronize()


def lacks_stream_waits() -> str:
    """Return why fences, flags and sums cannot be queued on CUDA streams here; "" where they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return lacks_stream_words()


@dataclass(frozen=True)
class _SymmetricWindow(MappedWindow):
    memory: SymmetricMemory
    host: Window

    def accumulate(self, remote: RemoteSlot, piece: Tensor, value: Tensor, op: str) -> Action:
        """Return an action that combines `value` into `piece` by `op` under a lock, and waits for the stream."""
        combine, (start, stop) = self.combiner(op), remote.bytes_of(piece)

        def run() -> None:
            self.memory.wait_for_stream()  # or others would wait for the lock while we wait for a product
            with self._locked(remote, start, stop):
                combine(piece, value)
                self.memory.wait_for_stream()

        return run

    @contextlib.contextmanager
    def _locked(self, remote: RemoteSlot, start: int, stop: int) -> Iterator[None]:
        host, base = self.memory.host, _BEYOND * (1 + remote.number)
        assert host is not None
        with host.locked(
            remote.rank, self.host.remote[remote.rank, SIGNALS].number, base + start, base + stop
        ):
            yield

    def fence(self, group: int, what: str) -> Action:
        """Return an action that waits for the stream, then until all ranks of the group run it."""
        meet = self.host.fence(group, what)

        def run() -> None:
            self.memory.wait_for_stream()
            meet()

        return run

    def notify(self, rank: int, flag: int) -> Callable[[int], object]:
        """Return a function that waits for the stream, then sets flag `flag` of `rank` to its argument."""
        tell = self.host.notify(rank, flag)

        def run(value: int) -> None:
            self.memory.wait_for_stream()
            tell(value)

        return run

    def await_flags(
        self, flags: Sequence[int], peers: Sequence[int], what: str
    ) -> Callable[[Sequence[int]], object]:
        """Return a function of `values` that waits until own flag `flags[i]` is at least `values[i]`."""
        return self.host.await_flags(flags, peers, what)
