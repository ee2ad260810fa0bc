"""Published results of papers beside ours: tables with verdicts, and the papers' figures computed again.

from meshweave_studies import reproduce_meshslice, select

study = reproduce_meshslice("tpu-v4-pod", select("meshslice", rows=["utilisation"]), by="estimate")
for row in study.rows:
    print(row.model, row.published, row.ours, row.verdict)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshweave.base.lazy import lazy_names

if TYPE_CHECKING:
    from meshweave_studies.papers import FIGURES as FIGURES
    from meshweave_studies.papers import reproduce_alpacomm as reproduce_alpacomm
    from meshweave_studies.papers import reproduce_atp as reproduce_atp
    from meshweave_studies.papers import reproduce_meshslice as reproduce_meshslice
    from meshweave_studies.papers import reproduce_slicing as reproduce_slicing
    from meshweave_studies.papers import reproduce_t3 as reproduce_t3
    from meshweave_studies.papers import reproduce_zero_bubble as reproduce_zero_bubble
    from meshweave_studies.papers import select as select
    from meshweave_studies.reproduction import PaperSummary as PaperSummary
    from meshweave_studies.reproduction import Reproduction as Reproduction
    from meshweave_studies.reproduction import Selection as Selection

__all__ = lazy_names(__name__)
