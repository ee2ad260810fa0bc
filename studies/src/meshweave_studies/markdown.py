"""Tables in Markdown: cells say what was read from files, so nothing in them is markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_MARKUP = re.compile(r"[\\`|]|\](?=[(:\[])")
_TAG, _ENTITY = re.compile(r"<(?=[A-Za-z/!?])"), re.compile(r"&(?=#|\w+;)")
_RULES = {"l": "---", "r": "---:"}


def markdown_words(text: str) -> str:
    """Return words, on one line, as Markdown that shows them: no tags, links, code or ends of cells."""
    line = _TAG.sub("&lt;", _ENTITY.sub("&amp;", " ".join(text.split())))
    return _MARKUP.sub(r"\\\g<0>", line)


def markdown_table(head: Sequence[str], sides: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a table. `sides` has "l" or "r" for each column, aligned to the left or the right."""
    body = [f"| {' | '.join(map(markdown_words, row))} |" for row in (head, *rows)]
    rule = f"|{'|'.join(_RULES[side] for side in sides)}|"
    return "\n".join([body[0], rule, *body[1:]]) + "\n"
