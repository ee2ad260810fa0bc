"""What ranks that train one model must have alike: they compare it by digests, and one error names what differs.

A rank describes what it has as `Words`: for each subject, such as "weights", a text for each thing by its name.
Ranks exchange a digest of each subject; only where one differs they exchange the words of that subject, to name
the thing that differs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshweave.base.errors import LayoutError, printable
from meshweave.execute.ranks.agreement import exchange
from meshweave.execute.ranks.blame import ranks_text
from meshweave.execute.torch.call_records import mark_as_shared
from meshweave.execute.torch.context import TorchContext

Words = Mapping[str, Mapping[str, str]]
"""{subject: {name of a thing: text that says what it is on this rank}}. Ranks compare subjects in common."""

REMEDIES = {
    "arguments": "give parallelize the same on every rank of the mesh",
    "versions": "install the same on every rank",
    "settings": "set them alike on every rank",
    "modules in training": "call train() and eval() alike on every rank",
    "modules": "make the same model on every rank",
    "configuration": "make the same model on every rank",
    "parameters": "give every rank the same model, with the same parameters frozen",
    "weights": "load the same weights on every rank or seed them alike, or give broadcast_weights=True",
    "arguments of a call": "call the model alike on every rank",
    "tokens": "every rank of the mesh gives the same tokens, all of them, and takes its part; batches of its own "
    "are for an outer data axis",
    "targets": "every rank of the mesh gives the same targets, all of them, and takes its part",
    "attention_mask": "every rank of the mesh gives the same mask, all of it, and takes its part",
    "position_ids": "every rank of the mesh gives the same positions, all of them, and takes its part",
    "generated tokens": "give generate the same on every rank, and let nothing else draw or choose tokens",
    "modes": "call train(), eval(), no_grad() and autocast alike on every rank",
    "generator": "dropout and sampling need torch's generator in the same state: seed it alike, and draw as often "
    "from it",
    "model": "call models in the same order on every rank",
    "progress": "every rank takes as many forward and optimizer steps, and clears gradients alike",
    "optimizer": "make the same optimizer, with the same settings, on every rank",
    "gradients": "every rank runs the same backward passes, and clips and scales gradients alike",
    "trials": "every rank tries the same plans, for as long",
    "copies": "ranks that have copies change them alike: load the same weights, and change none by hand",
}
"""What would be right, by subject."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def without_addresses(text: str) -> str:
    """Return text from `repr` without memory addresses, which differ between processes."""
    return _ADDRESS.sub("", text)


def digest(words: Mapping[str, Any]) -> str:
    """Return the first 24 hexadecimal digits of the SHA-256 of `words` as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:24]


def agree(context: TorchContext, ranks: Sequence[int], words: Words, what: str) -> None:
    """Raise an error on all ranks unless they have equal words under each subject that they share. Collective.

    Args:
        context: communicates between the ranks.
        ranks: the global ranks that compare, this one among them; nothing is done for a single one.
        words: this rank's, {subject: {name of a thing: text}}; a subject that other ranks lack is not compared
            with theirs.
        what: completes "waiting for ..." in errors.

    Raises:
        LayoutError: words of a subject differ; it names the subject, the ranks and the first thing that differs.
        RankLostError, DeadlineError: another rank died, or did not come in time.
        BindError: another rank is in another call.
    """
    if len(ranks) == 1:
        return
    own = json.dumps({subject: digest(of_it) for subject, of_it in words.items()})
    said = {rank: json.loads(text) for rank, text in exchange(context, ranks, own, what, topic=what).items()}
    for subject in dict.fromkeys(subject for each in said.values() for subject in each):
        holders = [rank for rank in said if subject in said[rank]]
        if len({said[rank][subject] for rank in holders}) > 1:
            details = exchange(context, ranks, json.dumps(words.get(subject)), what, topic=f"other {subject}")
            error = LayoutError(difference(subject, {rank: json.loads(details[rank]) for rank in holders}))
            mark_as_shared(error)
            raise error


def difference(subject: str, said: Mapping[int, Mapping[str, str]]) -> str:
    """Return the sentence of an error: which ranks differ from most ranks, in which thing first, and a remedy.

    Args:
        subject: what is compared, a key of `REMEDIES` or another; " of parts ..." of `copy_words` may follow.
        said: {global rank: {name of a thing: text}}; the texts of at least two ranks differ.
    """
    parties: dict[str, list[int]] = {}
    for rank in sorted(said):
        parties.setdefault(digest(said[rank]), []).append(rank)
    most, *others = sorted(parties.values(), key=lambda ranks: (-len(ranks), ranks))
    usual = said[most[0]]
    different = sorted(rank for party in others for rank in party)
    first = said[different[0]]
    names = [name for name in dict.fromkeys((*usual, *first)) if usual.get(name) != first.get(name)]
    subject, _, place = subject.partition(" of parts ")
    has = "has" if len(different) == 1 else "have"
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    shown = f"{names[0]}{more}{_values(first.get(names[0]), usual.get(names[0]))}"
    where = f" of the parts {place}" if place else ""
    return (
        f"{ranks_text(different)} {has} other {subject}{where} than {ranks_text(most)}: {shown}; "
        f"{REMEDIES.get(subject, 'give every rank the same')}"
    )


def _values(here: str | None, there: str | None) -> str:
    """Return what two ranks have in words; "" for checksums, which say nothing."""
    if here is None or there is None:
        return " is not there" if here is None else " is not there on the others"
    return "" if here.startswith("#") else f": {printable(here)}, and {printable(there)} on the others"
