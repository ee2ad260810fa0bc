"""What ranks find in a folder of checkpoints, and agree on before anything is loaded from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshweave.base.errors import CheckpointError
from meshweave.nn.training.files import check_bytes, opened_folder
from meshweave.nn.training.folder import found_checkpoint, found_checkpoints, read_manifest
from meshweave.nn.training.manifest import Manifest
from meshweave.nn.training.rounds import Rounds


class FolderTogether:
    """The folder of checkpoints as one of its ranks sees it.

    Args:
        folder: the folder of all checkpoints.
        rounds: exchanges messages between the ranks.
        rank, num_ranks: this rank's global number, and how many ranks there are.
    """

    def __init__(self, folder: Path, rounds: Rounds, rank: int, num_ranks: int) -> None:
        self.folder, self._rounds = folder, rounds
        self._rank, self._num_ranks = rank, num_ranks

    def error_text_of(self, act: Callable[[], object]) -> str:
        """Call `act`, which works in the folder; return "", or the text of the Exception that it raises."""
        try:
            act()
        except CheckpointError as error:
            return str(error)
        except OSError as error:
            return f"{error.filename or self.folder}: {error.strerror or error}"
        except Exception as error:  # of one rank: the others must not wait for it
            return f"{type(error).__name__}: {error}"
        return ""

    def manifest_of(self, step: int) -> tuple[Manifest, Path]:
        """Return (manifest, path of its folder) of the checkpoint of a step, as this rank sees it.

        Raises CheckpointError where it is missing or incomplete.
        """
        checkpoint = found_checkpoint(self.folder, step)
        if checkpoint is None:
            raise CheckpointError(f"{self.folder} has no whole checkpoint of step {step}")
        if checkpoint.wrong or checkpoint.manifest is None:
            raise CheckpointError(f"{self.named(step)} is not whole: it {checkpoint.wrong}")
        return checkpoint.manifest, self.folder / checkpoint.name

    def named(self, step: int) -> str:
        """Return the words for a checkpoint in messages: `the checkpoint of step 7 in FOLDER`."""
        return f"the checkpoint of step {step} in {self.folder}"

    def folder_if_unchanged(self, step: int, manifest: Manifest | None) -> Path:
        """Return the folder of a step's checkpoint if its manifest is still `manifest`; None skips the check.

        Raises CheckpointError where it is missing or incomplete, or has another manifest by now.
        """
        checkpoint, path = self.manifest_of(step)
        if manifest is not None and checkpoint.digest != manifest.digest:
            raise CheckpointError("was saved again meanwhile")
        return path

    def changed(self, step: int, manifest: Manifest | None = None) -> str:
        """Return, in words, why a checkpoint is not as it was written; "" where it is. The same on all ranks.

        Collective. Each rank reads some of the files. The reason is a file with another CRC-32, one that is
        missing or cannot be read, or a manifest other than `manifest`.

        Args:
            manifest: the one that the checkpoint must have; None takes the one that is there.
        """
        round_ = self._rounds.begin(f"all ranks to check the checkpoint of step {step}")

        def check() -> None:
            path = self.folder_if_unchanged(step, manifest)
            with opened_folder(path) as folder:
                own = manifest or read_manifest(path)
                check_bytes(folder, own, self._rank, self._num_ranks, round_.tick)

        reason = self.error_text_of(check)
        said = self._rounds.agree(round_, f"check step {step}", {"reason": reason})
        reason = next((each["reason"] for each in said if each["reason"]), "")
        return f"{self.named(step)} {reason}" if reason else ""

    def other_whole(self, step: int) -> str:
        """Return "; that of step N is whole" for another checkpoint than that of `step`, "" without. Collective.

        It is the last saved one whose bytes are all as they were written.
        """
        round_ = self._rounds.begin("the first rank to look for another checkpoint")
        words: dict[str, Any] = {}
        if not self._rank:
            words["steps"] = [each.step for each in found_checkpoints(self.folder) if not each.wrong]
        for other in reversed(self._rounds.agree(round_, "look for another checkpoint", words)[0]["steps"]):
            if other != step and not self.changed(other):
                return f"; that of step {other} is whole"
        return ""
