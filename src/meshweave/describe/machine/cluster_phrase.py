"""Clusters in words: `64 x H100, 8 a host, 8 x 400Gb`.

A phrase counts chips, names their kind, and may say how many share a host and which NICs a host has. `8 hosts of
8 x H100` counts the chips by hosts. What a phrase leaves out is that of the catalog's usual host of the chip: the
entry whose `usual_for` has the chip's name. Words of a kind of network (`2 x 200Gb InfiniBand`) change nothing:
NICs are priced by their rate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NoReturn

from meshweave.base.errors import DescriptionError, nearest_word, printable
from meshweave.describe.catalog import catalog_text, clusters
from meshweave.describe.files import parse_table
from meshweave.describe.like import table_like

FORM = "64 x H100, 8 a host, 8 x 400Gb"
_CHIPS = re.compile(r"(\d{1,18})\s*(?:[x×*]\s*)?(\S.*)", re.IGNORECASE)
_HOST = r"(?:hosts?|nodes?|servers?|machines?)"
_OF_HOSTS = re.compile(
    rf"(\d{{1,9}})\s*(?:[x×*]\s*)?(?:{_HOST}\s*(?:of|with|[x×*])\s*|[x×*]\s*)(\d{{1,9}})(?!\d)\s*(?:[x×*]\s*)?(\S.*)",
    re.IGNORECASE,
)
_PER_HOST = re.compile(rf"(\d{{1,9}})\s*(?:chips?|gpus?)?\s*(?:a|per|/|each)\s*{_HOST}", re.IGNORECASE)
_NICS = re.compile(
    r"(?:(\d{1,9})\s*[x×*]\s*)?(\d{1,9}(?:\.\d{1,6})?)\s*([gt])(b|bit|byte)(?:/s|ps)?"
    r"(?:\s*(?:infiniband|ib|ethernet|roce|efa|[hn]dr|nics?|ports?))*",
    re.IGNORECASE,
)
_UNITS = {"g": 1e9, "t": 1e12}


def is_phrase(text: str) -> bool:
    """Return whether a text may be a cluster in words: a digit first, and no .toml or .json at the end."""
    return re.match(r"\s*\d", text) is not None and not text.lower().endswith((".toml", ".json"))


def phrase_table(phrase: str) -> tuple[dict[str, Any], int]:
    """Return the table of a cluster file that a phrase means, and the number of chips to give its cluster.

    The table itself has the number of chips of the usual host unless the phrase says how many share a host.

    Raises:
        DescriptionError: the phrase has no such form, its numbers do not fit, or the catalog has no usual host
            of the chip.
    """
    first, *others = (part.strip() for part in phrase.split(","))
    stated, of_hosts = _CHIPS.fullmatch(first), _OF_HOSTS.fullmatch(first)
    if stated is None:
        _refuse(phrase, f"'{printable(first)}' is no number of chips and their kind")
    chips, kind = int(stated[1]), stated[2]
    if of_hosts and _plain(kind) not in _usual_hosts():
        chips, kind = int(of_hosts[1]) * int(of_hosts[2]), of_hosts[3]
        others.insert(0, f"{of_hosts[2]} a host")
    name, host = usual_host(kind)
    if others and host["network"].get("kind") != "hosts":
        _refuse(phrase, f"{name} has no hosts with NICs; give the number of chips alone")
    network: dict[str, Any] = {}
    of_host = _only(phrase, "chips a host", filter(None, map(_PER_HOST.fullmatch, others)))
    of_nics = _only(phrase, "NICs of a host", filter(None, map(_NICS.fullmatch, others)))
    for part in others:
        if not (_PER_HOST.fullmatch(part) or _NICS.fullmatch(part)):
            _refuse(phrase, f"'{printable(part)}' is neither chips a host nor NICs of a host")
    if of_host:
        network |= _hosts(phrase, chips, int(of_host[1]), host["network"])
    if of_nics:
        network["nic"] = {"link_bytes_per_s": _bytes_per_s(of_nics), "source": "as stated"}
        if of_nics[1]:
            network["nics_per_host"] = int(of_nics[1])
    title = ", ".join([f"{chips} x {kind}", *others])
    return {"name": title, "like": name, "network": network}, chips


def _only(phrase: str, what: str, stated: Iterator[re.Match[str]]) -> re.Match[str] | None:
    """Return the one statement of a thing, or None. Raises DescriptionError where there are two."""
    first, second = next(stated, None), next(stated, None)
    if second is not None:
        _refuse(phrase, f"{what} are stated twice")
    return first


def _hosts(phrase: str, chips: int, per_host: int, usual: dict[str, Any]) -> dict[str, Any]:
    if not per_host or chips % per_host:
        _refuse(phrase, f"{chips} chips are not hosts of {per_host}")
    nics = int(usual["nics_per_host"]) * per_host // int(usual["chips_per_host"])
    return {"num_hosts": chips // per_host, "chips_per_host": per_host, "nics_per_host": max(nics, 1)}


def usual_host(chip: str) -> tuple[str, dict[str, Any]]:
    """Return the catalog name and the table of the cluster whose `usual_for` lists a chip's name.

    Names are compared by letters and digits alone, in any case. A key `like` of the table is already merged.

    Raises:
        DescriptionError: no entry is usual for it; the error names those that there are.
    """
    known = _usual_hosts()
    wanted = _plain(chip)
    if wanted not in known:
        titles = {plain: title for plain, (title, _) in known.items()}
        begins = [title for title in titles.values() if chip.lower().startswith(f"{title.lower()} ")]
        if begins:
            what = f"what follows '{max(begins, key=len)}' is not understood"
            _refuse(chip, f"{what}; links stand after a comma, as a rate")
        near = nearest_word(wanted, titles)
        meant = f" (did you mean '{titles[near]}'?)" if near else ""
        raise DescriptionError(
            f"the catalog has no usual host of '{printable(chip)}'{meant}; give words such as '{FORM}', of "
            f"{', '.join(sorted(titles.values()))}"
        )
    name = known[wanted][1]
    return name, table_like(
        "clusters", parse_table(catalog_text("clusters", name), f"{name}.toml", "toml"), name
    )


@lru_cache(maxsize=1)
def _usual_hosts() -> dict[str, tuple[str, str]]:
    """Return by plain name of a chip its title and the entry that is usual for it."""
    return {_plain(title): (title, name) for title, name in _titles()}


def _titles() -> Iterator[tuple[str, str]]:
    for name in clusters():
        for title in parse_table(catalog_text("clusters", name), f"{name}.toml", "toml").get("usual_for", ()):
            yield title, name


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _bytes_per_s(stated: re.Match[str]) -> float:
    in_bits = not stated[4].lower().startswith("by") and stated[4] != "B"
    return float(stated[2]) * _UNITS[stated[3].lower()] / (8 if in_bits else 1)


def _refuse(phrase: str, why: str) -> NoReturn:
    raise DescriptionError(f"cluster '{printable(phrase)}': {why}; give words such as '{FORM}'")
