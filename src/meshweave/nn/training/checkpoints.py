"""`meshweave.Checkpoints`: the tensors of all ranks, saved in the background of the training.

`save` copies what this rank writes and returns. A thread of each rank writes it (`files`). When all have written,
the first rank gives the checkpoint its name (`folder`). Messages between ranks go through the store
(`rounds`), and whatever one of them refuses, all of them refuse.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshweave.base.errors import CheckpointError
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.training.files import bytes_of, load_pieces, opened_folder, write_synced
from meshweave.nn.training.folder import (
    FolderLock,
    found_checkpoints,
    make_whole,
    part_name,
    remove,
    remove_older,
    sweep,
)
from meshweave.nn.training.manifest import (
    Manifest,
    SavedBox,
    SavedFile,
    WrittenTensor,
    checked_notes,
    checked_step,
    file_name,
)
from meshweave.nn.training.pieces import Saved, ShardPieces, assigned_boxes, pieces_of, why_not_loadable
from meshweave.nn.training.rounds import AgreementRound, Rounds
from meshweave.nn.training.together import FolderTogether

_LOG = logging.getLogger(__name__)
_POLL_S = 0.02
_LEFT_S = 3.0
"""Seconds in which a rank must be seen to write, where the program has ended without a `wait`."""


class Checkpoints:
    """The checkpoints in a folder of a file system that all ranks share.

    All ranks make one, and call its methods in the same order. A tensor is a DTensor, or a plain tensor that is
    the same on all ranks that give it. Names are global: ranks that give different names, as the stages of a
    pipeline do, save all of them, and each rank loads those that it gives, whichever ranks had them.

    Args:
        folder: is made where it is not there. The first save removes what an earlier run left unfinished in it.
        keep: how many whole checkpoints stay, at least 1. Those from which the last one does not descend, since
            the training was resumed from an earlier step, are removed first; then the oldest.
        context: deadline and liveness of waits for other ranks; default: those of the default process group.

    Raises:
        CheckpointError: the folder cannot be made, or `keep` is no positive integer; on all ranks.
        RankLostError, DeadlineError: other ranks are missing or late.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, context: TorchContext | None = None) -> None:
        self.folder, self._keep = Path(folder), keep
        self._context = context or TorchContext.default()
        self._rank, self._num_ranks = self._context.rank or 0, self._context.num_ranks
        self._parent: int | None = None
        self._saving: tuple[int, AgreementRound] | None = None
        self._writer: threading.Thread | None = None
        self._rounds = Rounds(self._context)
        self._there = FolderTogether(self.folder, self._rounds, self._rank, self._num_ranks)
        round_ = self._rounds.begin("all ranks to open the checkpoints")
        wrong = "" if type(keep) is int and keep > 0 else f"keep={keep!r} checkpoints, and one at least stays"
        if not wrong and self._is_first:
            wrong = self._there.error_text_of(lambda: self.folder.mkdir(parents=True, exist_ok=True))
        self._rounds.agree(round_, "open checkpoints", {"wrong": wrong})

    @property
    def num_ranks(self) -> int:
        """Return how many ranks save and load together."""
        return self._num_ranks

    @property
    def _is_first(self) -> bool:
        return not self._rank

    # --- saving ----------------------------------------------------------------------------------------------

    def save(self, step: int, tensors: Mapping[str, Saved], notes: Mapping[str, Any] | None = None) -> None:
        """Copy the tensors, and write them in the background of the training that follows.

        Collective; waits for the previous save first.

        Args:
            step: how many steps were trained; names the checkpoint.
            tensors: by global name. They may change as soon as this returns.
            notes: what else to keep, as JSON values that are the same on all ranks.

        Raises:
            CheckpointError: on all ranks, where one of them gives what cannot be saved, another job saves
                into the folder, or the save before this one failed, see `wait`.
            RankLostError, DeadlineError: other ranks are missing or late, also in the save before this one.
        """
        self.wait()
        pieces: dict[str, ShardPieces] = {}
        words: dict[str, Any] = {}
        topic = "save"
        round_ = self._rounds.begin("all ranks to save a step")
        try:
            step, kept = checked_step(step), checked_notes(notes or {})
            digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
            topic = f"save step {step} with notes {digest}"
            pieces = {name: pieces_of(name, value) for name, value in tensors.items()}
            words["tensors"] = [own.offer(name) for name, own in pieces.items() if own.tensors or own.dtype]
            if self._is_first:
                words["wrong"] = self._there.error_text_of(lambda: self._begin(step))
        except CheckpointError as error:
            words = {"wrong": str(error)}
        try:
            said = self._rounds.agree(round_, topic, words)
            whole, shares = assigned_boxes([each["tensors"] for each in said])
        except CheckpointError as error:
            if self._is_first and not words.get("wrong"):
                self._there.error_text_of(lambda: remove(self.folder / part_name(step)))
            raise CheckpointError(f"the checkpoint cannot be saved: {error}") from None
        _LOG.info("saving step %d into %s: %d tensors of this rank", step, self.folder, len(pieces))
        round_ = self._rounds.begin(f"the checkpoint of step {step}")
        self._saving = step, round_
        copies: list[Tensor] = []
        wrong = self._there.error_text_of(
            lambda: copies.extend(pieces[box.name].copied(box) for box in shares[self._rank])
        )
        self._writer = threading.Thread(
            target=self._write,
            args=(round_, step, whole, shares, copies, kept, wrong),
            name="meshweave-checkpoint",
        )
        self._writer.start()

    def _begin(self, step: int) -> None:
        """Take the folder, and make room for a checkpoint. Raises CheckpointError and OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        FolderLock.take(
            self.folder, self, lambda other: other._writer is not None and other._writer.is_alive()
        )
        sweep(self.folder)
        (self.folder / part_name(step)).mkdir()

    def _write(
        self,
        round_: AgreementRound,
        step: int,
        whole: Mapping[str, WrittenTensor],
        shares: Sequence[Sequence[SavedBox]],
        copies: list[Tensor],
        notes: Mapping[str, Any],
        wrong: str,
    ) -> None:
        """Write what this rank has to; on the first rank, make the checkpoint whole once all have."""
        own: dict[str, Any] = {}

        def write() -> None:
            with opened_folder(self.folder / part_name(step)) as part:
                parts = map(bytes_of, copies)
                own["bytes"], own["crc32"] = write_synced(part, file_name(self._rank), parts, round_.tick)

        try:
            wrong = wrong or (self._there.error_text_of(write) if copies else "")
            round_.give({**own, "wrong": f"rank {self._rank}: {wrong}" if wrong else ""})
            copies.clear()  # the others may take long
            if self._is_first and (said := self._said_by_all(round_)) is not None:
                wrong = next((each["wrong"] for each in said if each["wrong"]), "")
                files = {
                    file_name(rank): SavedFile(each["bytes"], each["crc32"], tuple(boxes))
                    for rank, (each, boxes) in enumerate(zip(said, shares, strict=True))
                    if boxes and not wrong
                }
                wrong = wrong or self._there.error_text_of(
                    lambda: self._finish(round_, step, whole, files, notes)
                )
                if wrong:
                    self._there.error_text_of(lambda: remove(self.folder / part_name(step)))
                round_.give({"wrong": wrong}, "result")
        except (RuntimeError, OSError):  # the store is gone; `wait` says so
            pass

    def _said_by_all(self, round_: AgreementRound) -> list[Any] | None:
        """Return what all ranks say of what they wrote; None where nobody waits for it any more."""
        seen: dict[int, tuple[int, float]] = {}
        while (said := round_.given(range(self._num_ranks))) is None:
            is_over = not threading.main_thread().is_alive() and not round_.is_at_work(_LEFT_S, seen)
            if round_.is_given_up or is_over:
                return None
            time.sleep(_POLL_S)
        return said

    def _finish(
        self,
        round_: AgreementRound,
        step: int,
        whole: Mapping[str, WrittenTensor],
        files: Mapping[str, SavedFile],
        notes: Mapping[str, Any],
    ) -> None:
        round_.tick()
        serials = [each.manifest.serial for each in found_checkpoints(self.folder) if each.manifest]
        serial = max(serials, default=0) + 1
        make_whole(self.folder, Manifest(step, serial, self._parent, whole, files, notes))
        self._parent = serial
        round_.tick()
        if left := self._there.error_text_of(lambda: remove_older(self.folder, self._keep)):
            warnings.warn(
                f"step {step} is saved, and an older checkpoint cannot be removed: {left}", stacklevel=2
            )

    @property
    def is_saving(self) -> bool:
        """Return whether there was a `save` since the last `wait`; every save, look and load waits, too."""
        return self._saving is not None

    def wait(self) -> None:
        """Wait until the last `save` of all ranks is whole on the disk, as long as they work at it. Collective.

        Raises:
            CheckpointError: it could not be written; on all ranks the same. Checkpoints that were whole still are.
            RankLostError, DeadlineError: other ranks were lost meanwhile, or neither wrote nor finished.
        """
        if self._saving is None:
            return
        (step, round_), self._saving = self._saving, None
        try:
            (result,) = round_.wait_for(["result"])
        except BaseException:
            round_.is_given_up = True
            raise
        self._rounds.end(round_)
        if self._writer is not None:
            self._writer.join()
        if result["wrong"]:
            raise CheckpointError(f"the checkpoint of step {step} was not saved: {result['wrong']}")

    # --- loading ---------------------------------------------------------------------------------------------

    def latest(self, *, checked: bool = False) -> int | None:
        """Return the step of the whole checkpoint that was saved last, the same on all ranks; None without any.

        A later one that is not whole is passed over with a warning. Collective.

        Args:
            checked: whether ranks read all bytes of it first, so that one whose bytes changed is passed over
                too.

        Raises:
            CheckpointError: there are checkpoints, and none is whole; or the last `save` failed.
            RankLostError, DeadlineError: other ranks are missing or late.
        """
        self.wait()
        round_ = self._rounds.begin("the first rank to look at the checkpoints")
        words: dict[str, Any] = {}
        if self._is_first:
            present = found_checkpoints(self.folder)
            whole = [each for each in present if not each.wrong]
            last = whole[-1].step if whole else -1
            passed_over = present[present.index(whole[-1]) + 1 :] if whole else present
            harmed = [each for each in present if each.wrong and (each.step > last or each in passed_over)]
            words["whole"] = [each.step for each in whole]
            words["harmed"] = [
                f"{self._there.named(each.step)} is not whole: it {each.wrong}" for each in harmed
            ]
        said = self._rounds.agree(round_, "look for the last checkpoint", words)[0]
        harmed = said["harmed"]
        for step in reversed(said["whole"]):
            if not checked or not (changed := self._there.changed(step)):
                for line in harmed if self._is_first else ():
                    warnings.warn(f"{line}; step {step} is taken", stacklevel=2)
                return int(step)
            harmed.append(changed)
        if harmed:
            raise CheckpointError(f"{harmed[-1]}; no other checkpoint there is whole")
        return None

    def notes(self, step: int) -> dict[str, Any]:
        """Return the `notes` that `save` was given at a step. Collective.

        Raises CheckpointError, on all ranks, where that checkpoint is not whole or the last `save` failed;
        RankLostError or DeadlineError where other ranks are missing or late.
        """
        return dict(self.manifest(step).notes)

    def manifest(self, step: int, fits: Callable[[Manifest], dict[str, Any]] | None = None) -> Manifest:
        """Return the manifest of the checkpoint of a step. Collective.

        Args:
            fits: a function of the manifest that returns a dict: with "wrong", in words, where this rank cannot
                take the checkpoint, else with "unused", the indices in `Manifest.tensors` of those that it does
                not take. None for no such test.

        Raises CheckpointError on all ranks where it is not whole, ranks see different ones, one of them cannot
        take it, all leave the same tensor unused, or the last `save` failed; RankLostError or DeadlineError
        where other ranks are missing or late.
        """
        self.wait()
        round_ = self._rounds.begin(f"all ranks to look at the checkpoint of step {step}")
        words: dict[str, Any] = {}
        manifest = None
        try:
            step = checked_step(step)
            manifest, _ = self._there.manifest_of(step)
            words = {"digest": manifest.digest, **(fits(manifest) if fits is not None else {})}
        except CheckpointError as error:
            words = {"damaged": str(error)}
        said = self._rounds.agree(round_, f"load step {step}", words)
        damaged = next((each["damaged"] for each in said if "damaged" in each), "")
        if not damaged and len({each["digest"] for each in said}) > 1:
            damaged = f"ranks see different checkpoints of step {step} in {self.folder}"
        if damaged:
            raise CheckpointError(damaged + self._there.other_whole(step))
        assert manifest is not None
        unused = [set(each["unused"]) for each in said if "unused" in each]
        if unused and (extra := sorted(set.intersection(*unused))):
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            name = list(manifest.tensors)[extra[0]]
            raise CheckpointError(
                f"{self._there.named(step)} has '{name}'{more}, which nothing here takes; "
                "extra=True loads the rest"
            )
        return manifest

    def load(
        self,
        step: int,
        tensors: Mapping[str, Saved],
        *,
        casts: bool = False,
        extra: bool | Callable[[str], bool] = False,
    ) -> dict[str, Any]:
        """Load the checkpoint of a step into `tensors`, whatever their placements; return its notes. Collective.

        Args:
            casts: whether a tensor of one floating-point dtype may be loaded into another.
            extra: whether the checkpoint may have tensors that no rank gives; or a function of a tensor's name.

        Raises:
            CheckpointError: on all ranks, and no tensor was touched: the last `save` failed, it is not whole, a
                file has other bytes than were written, it lacks a tensor, has one of another shape or dtype, or
                one that nobody takes. The message says which other is whole. Where a file cannot be read to its
                end although it could be just before, the message says that tensors were touched.
            RankLostError, DeadlineError: other ranks are missing or late.
        """
        pieces: dict[str, ShardPieces] = {}

        def fits(manifest: Manifest) -> dict[str, Any]:
            try:
                pieces.update((name, pieces_of(name, value)) for name, value in tensors.items())
            except CheckpointError as error:
                return {"wrong": f"{self._there.named(step)} cannot be loaded: {error}"}
            for name, own in pieces.items():
                if wrong := why_not_loadable(name, own, manifest.tensors, casts):
                    return {"wrong": f"{self._there.named(step)} {wrong}"}
            return {"unused": [at for at, name in enumerate(manifest.tensors) if not is_taken(name)]}

        def is_taken(name: str) -> bool:
            return name in tensors or (extra(name) if callable(extra) else extra)

        manifest = self.manifest(step, fits)
        if changed := self._there.changed(step, manifest):
            raise CheckpointError(changed + self._there.other_whole(step))
        round_ = self._rounds.begin(f"all ranks to load the checkpoint of step {step}")

        def read() -> None:
            with opened_folder(self._there.folder_if_unchanged(step, manifest)) as folder, torch.no_grad():
                load_pieces(folder, manifest, pieces, round_.tick)

        wrong = self._there.error_text_of(read)
        if wrong:
            wrong = f"{self._there.named(step)} {wrong}; some of the tensors here have been read"
        self._rounds.agree(round_, f"have loaded step {step}", {"wrong": wrong})
        self._parent = manifest.serial
        return dict(manifest.notes)

    def refuse_together(self, step: int, wrong: str, told: Any = None) -> list[Any]:
        """Return each rank's `told`, by rank; raise CheckpointError on all if any has a `wrong`. Collective.

        The message is "the checkpoint of step N in FOLDER", then `wrong`, such as "cannot be saved: ...".
        """
        wrong = f"{self._there.named(step)} {wrong}" if wrong else ""
        round_ = self._rounds.begin(f"all ranks to take step {step}")
        said = self._rounds.agree(round_, f"take step {step}", {"wrong": wrong, "told": told})
        return [each["told"] for each in said]
