"""Published results of papers beside ours: tables with verdicts, and the papers' figures computed again.

from meshweave_studies import reproduce_meshslice, select

study = reproduce_meshslice("tpu-v4-pod", select("meshslice", rows=["utilisation"]), by="estimate")
for row in study.rows:
    print(row.model, row.published, row.ours, row.verdict)
"""

from meshweave_studies.papers import (
    FIGURES,
    reproduce_alpacomm,
    reproduce_atp,
    reproduce_meshslice,
    reproduce_slicing,
    reproduce_t3,
    reproduce_zero_bubble,
    select,
)
from meshweave_studies.reproduction import PaperSummary, Reproduction, Selection

__all__ = [
    "FIGURES",
    "PaperSummary",
    "Reproduction",
    "Selection",
    "reproduce_alpacomm",
    "reproduce_atp",
    "reproduce_meshslice",
    "reproduce_slicing",
    "reproduce_t3",
    "reproduce_zero_bubble",
    "select",
]
