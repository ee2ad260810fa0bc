"""What the library says while it works, by Python's `logging` under the name "meshweave".

Modules log with `logging.getLogger(__name__)`. Nothing is shown below warnings until a program sets a level.
"""

from __future__ import annotations

import logging

from meshweave.base.errors import DescriptionError, require_known

LEVELS = ("debug", "info", "warning", "error", "off")


def set_log_level(level: str) -> None:
    """Show what the library says while it works, on stderr, from a level on.

    Where the program has handlers of its own (`logging.basicConfig`), these get the records, and none is added.
    Each process has its own level: a rank of `mw.launch` sets it in its function.

    Args:
        level: "debug", "info" (what was searched, bound and saved), "warning" (the default), "error" or "off".

    Raises:
        DescriptionError: there is no such level.
    """
    require_known(level, LEVELS, "there is no level", DescriptionError, "there are")
    logger = logging.getLogger("meshweave")
    logger.setLevel(logging.CRITICAL + 1 if level == "off" else level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
