"""`meshweave.Checkpoints`: the tensors of all ranks, saved beside the training by torch's distributed checkpoint.

`save` copies the tensors and returns. A thread of each rank writes them, as torch's `async_save` does it, over a
process group of its own. A checkpoint gets its name when all of it is on the disk (`manifest`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from meshweave.base.errors import DescriptionError, did_you_mean
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.training.manifest import (
    Manifest,
    folder_name,
    make_whole,
    note_checksums,
    part_name,
    remove_older,
    remove_parts,
    whole_steps,
)
from meshweave.nn.training.pieces import PiecesLoadPlanner, PiecesSavePlanner, ShardPieces

Saved: TypeAlias = Tensor | ShardPieces
"""What a checkpoint takes under a name."""


class _ChecksumWriter(dcp.FileSystemWriter):  # type: ignore[misc]
    """Writes the files of a rank, and then their checksums, in the thread that writes.

    What was written is read again at once, from the memory in which the system keeps it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, overwrite=True)
        self._folder, self._rank = folder, rank

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write what a plan has for this rank. Returns torch's future of the results."""
        written = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        note_checksums(self._folder, self._rank, sorted(names))
        return written


class Checkpoints:
    """The checkpoints in a folder that all ranks reach.

    All ranks make one, and call its methods in the same order. A tensor is a DTensor, or a plain tensor that is
    the same on all ranks that give it. Names are global: ranks that give different names, as the stages of a
    pipeline do, save all of them, and each rank loads those that it gives, whichever ranks had them.

    Args:
        folder: is made where it is not there. What an earlier run left unfinished in it is removed.
        keep: how many whole checkpoints stay; the oldest go.
        context: deadline and liveness of waits for other ranks; default: those of the default process group.

    Raises:
        RankLostError, DeadlineError: other ranks are missing or late.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, context: TorchContext | None = None) -> None:
        self.folder, self._keep = Path(folder), max(keep, 1)
        self._context = context or TorchContext.default()
        self._ranks = range(self._context.num_ranks)
        self._is_first = not self._context.rank
        self._saving: tuple[int, Future[None]] | None = None
        self._group: Any = None
        if self._is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_parts(self.folder)
        if self._context.is_distributed:
            timeout = timedelta(seconds=self._context.deadline_s)
            with self._context.guard("all ranks to open the checkpoints", self._ranks):
                self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoints")
                dist.barrier(self._group)  # nobody writes before what was unfinished is gone

    # --- saving ----------------------------------------------------------------------------------------------

    def save(self, step: int, tensors: Mapping[str, Saved], notes: Mapping[str, Any] | None = None) -> None:
        """Save tensors beside what follows; waits for the save before this one, and to copy the tensors.

        Args:
            step: how many steps were trained; names the checkpoint.
            tensors: by global name. They may change as soon as this returns.
            notes: what else there is, the same on all ranks, as JSON.

        Raises:
            RankLostError, DeadlineError, OSError: of the save before this one, see `wait`.
        """
        self.wait()
        writer = _ChecksumWriter(self.folder / part_name(step), self._context.rank or 0)
        plain, pieces = _sorted(tensors)
        planner = PiecesSavePlanner({name: each.copied() for name, each in pieces.items()})
        written: Any = dcp.async_save(
            plain,
            storage_writer=writer,
            planner=planner,
            process_group=self._group,
            no_dist=self._group is None,
        )
        whole: Future[None] = Future()
        written.add_done_callback(lambda future: self._finish(future, whole, step, dict(notes or {})))
        self._saving = step, whole

    def _finish(self, written: Future[Any], whole: Future[None], step: int, notes: dict[str, Any]) -> None:
        """Make a checkpoint whole once this rank's writer says that all ranks have written."""
        try:
            written.result()
            if self._is_first:
                make_whole(self.folder, step, notes)
                remove_older(self.folder, self._keep)
        except BaseException as error:
            whole.set_exception(error)
        else:
            whole.set_result(None)

    @property
    def is_saving(self) -> bool:
        """Whether this rank still writes, or has not yet been asked how a save went."""
        return self._saving is not None

    def wait(self) -> None:
        """Wait until the last `save` is on the disk; on the first rank until it is whole.

        Raises:
            RankLostError, DeadlineError: other ranks were lost or late meanwhile.
            OSError, RuntimeError: it could not be written.
        """
        if self._saving is None:
            return
        (step, whole), self._saving = self._saving, None
        what = f"the checkpoint of step {step}"
        with self._context.guard(what, self._ranks) as wait, _as_runtime_error(what):
            whole.result(wait.timeout.total_seconds())

    # --- loading ---------------------------------------------------------------------------------------------

    def latest(self) -> int | None:
        """Return the step of the last whole checkpoint, the same on all ranks; None where there is none."""
        steps = whole_steps(self.folder) if self._is_first else []
        step: int | None = self._from_first(steps[-1] if steps else None)
        return step

    def notes(self, step: int) -> dict[str, Any]:
        """Return the notes of the checkpoint of a step. Raises DescriptionError where that is not whole."""
        return self._manifest(step).notes

    def _manifest(self, step: int) -> Manifest:
        """Return the manifest of the checkpoint of a step, on all ranks. Raises as `notes` does."""
        own = Manifest.read(self.folder / folder_name(step)) if self._is_first else None
        manifest: Manifest | None = self._from_first(own)
        if manifest is None:
            raise DescriptionError(f"{self.folder} has no whole checkpoint of step {step}")
        return manifest

    def load(self, step: int, tensors: Mapping[str, Saved]) -> dict[str, Any]:
        """Load the checkpoint of a step into `tensors`, laid as they lie; collective. Return its notes.

        Raises:
            DescriptionError: it is not whole, a file has other bytes than were written, or it lacks a tensor, or
                has one of another shape.
        """
        manifest = self._manifest(step)
        self._check_bytes(step, manifest)
        reader = dcp.FileSystemReader(self.folder / folder_name(step))
        self._check_fit(step, reader, tensors)
        what = f"all ranks to load the checkpoint of step {step}"
        with self._context.guard(what, self._ranks), torch.no_grad(), _as_runtime_error(what):
            plain, pieces = _sorted(tensors)
            planner = PiecesLoadPlanner(pieces)
            dcp.load(
                plain,
                storage_reader=reader,
                planner=planner,
                process_group=self._group,
                no_dist=self._group is None,
            )
        return manifest.notes

    def _check_bytes(self, step: int, manifest: Manifest) -> None:
        """Raise DescriptionError on all ranks where a file has not its checksum; each rank reads some of them."""
        share, num_shares = self._context.rank or 0, len(self._ranks)
        name = manifest.changed_file(self.folder / folder_name(step), share, num_shares)
        self._refuse_together(
            step, "" if name is None else f"has a file {name} with other bytes than were written"
        )

    def _check_fit(self, step: int, reader: dcp.FileSystemReader, tensors: Mapping[str, Saved]) -> None:
        """Raise DescriptionError on all ranks where the tensors of one do not fit."""
        saved = reader.read_metadata().state_dict_metadata
        wrong = ""
        for name, tensor in tensors.items():
            size = getattr(saved.get(name), "size", None)
            if name not in saved:
                wrong = f"has no tensor '{name}'{did_you_mean(name, saved)}"
            elif size is not None and tuple(size) != tuple(tensor.shape):
                wrong = f"has '{name}' of shape {tuple(size)}, and here it is {tuple(tensor.shape)}"
        self._refuse_together(step, wrong)

    def _refuse_together(self, step: int, wrong: str) -> None:
        """Raise DescriptionError on all ranks where one of them says what is wrong with a checkpoint."""
        every: list[Any] = [wrong]
        if self._group is not None:
            every = [None] * len(self._ranks)
            with self._context.guard("all ranks to look at the checkpoint that they load", self._ranks):
                dist.all_gather_object(every, wrong, self._group)
        first = next((each for each in every if each), None)
        if first is not None:
            raise DescriptionError(f"the checkpoint of step {step} in {self.folder} {first}")

    def _from_first(self, value: Any) -> Any:
        """Return what the first rank gives."""
        if self._group is None:
            return value
        values = [value]
        with self._context.guard("the first rank to look at the checkpoints", self._ranks):
            dist.broadcast_object_list(values, 0, self._group)
        return values[0]


def _sorted(tensors: Mapping[str, Saved]) -> tuple[dict[str, Tensor], dict[str, ShardPieces]]:
    """Return the tensors, and those of which this rank has several boxes."""
    pieces = {name: value for name, value in tensors.items() if isinstance(value, ShardPieces)}
    return {name: value for name, value in tensors.items() if isinstance(value, Tensor)}, pieces


@contextlib.contextmanager
def _as_runtime_error(what: str) -> Iterator[None]:
    """Turn torch's error, which gathers those of all ranks, into a RuntimeError in one line: that of the first."""
    try:
        yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()), (0, (error, None)))
        words = " ".join(str(cause).split())[:300]
        raise RuntimeError(f"{what} failed on rank {rank}: {type(cause).__name__}: {words}") from error
