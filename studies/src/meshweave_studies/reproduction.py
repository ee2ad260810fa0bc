"""What the study of every paper results in: judged rows and figures, and what a table's head says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshweave.base.errors import UnsupportedError
from meshweave_studies.figures import Figure
from meshweave_studies.verdict import JudgedRow


@dataclass(frozen=True)
class Selection:
    """The rows and figures of a paper that are computed.

    Attributes:
        rows: ids of rows. Empty: all rows; None: no row.
        figures: numbers of figures. Empty: all figures; None: no figure.
    """

    rows: tuple[str, ...] | None = ()
    figures: tuple[int, ...] | None = ()

    def without_figures(self, reading: str) -> Selection:
        """Return this selection without figures. Raises UnsupportedError where it names some."""
        if self.figures:
            raise UnsupportedError(f"reading {reading} has no figures: it is of some rows alone")
        return replace(self, figures=None)


def file_stem(paper: str, reading: str, machines: Sequence[str], usual: Sequence[str], default: str) -> str:
    """Return the beginning of the names of files: paper and machines, or paper and reading.

    The machines follow a reading that is not the default where they are not its usual ones.
    """
    if reading == default:
        return "-".join([paper, *machines])
    return "-".join([paper, reading, *(machines if list(machines) != list(usual) else [])])


@dataclass(frozen=True)
class PaperSummary:
    """What the head of a table says of its rows and figures.

    Attributes:
        machines: names of the clusters, each with the source of its constants.
        method: how our values were computed.
        findings: sentences about what the numbers say together.
        subject: head of the column that names what a row is computed for.
    """

    title: str
    citation: str
    machines: tuple[tuple[str, str], ...]
    method: str
    findings: tuple[str, ...] = ()
    subject: str = "model"

    @property
    def names(self) -> str:
        """The names of the machines, joined into text."""
        names = [name for name, _ in self.machines]
        return " and ".join(names) if len(names) <= 2 else f"{', '.join(names[:-1])} and {names[-1]}"


@dataclass(frozen=True)
class CheckedOrdering:
    """Which of two sizes a paper says is the larger one, checked in all cases that it speaks of.

    Attributes:
        statement: what the paper says, in our words.
        where: the figure or section.
        cases: the number of cases.
        wrong: those in which ours are the other way round.
    """

    statement: str
    where: str
    cases: int
    wrong: tuple[str, ...]

    @property
    def holds(self) -> int:
        """Return the number of cases in which it holds."""
        return self.cases - len(self.wrong)

    def to_json(self) -> dict[str, Any]:
        """Return the statement and how many cases hold, as JSON values."""
        return {
            "statement": self.statement,
            "where": self.where,
            "cases": self.cases,
            "holds": self.holds,
            "wrong": list(self.wrong),
        }


@dataclass(frozen=True)
class Reproduction:
    """The rows and figures of a paper, computed again.

    Attributes:
        paper: the paper's short name.
        file_stem: the beginning of the names of its files, if not `stem`'s own choice.
        inputs: what the JSON says of the run besides its rows and figures: clusters, reading, batches, findings.
        orderings: the orderings that the text states, where they are checked one by one.
    """

    paper: str
    summary: PaperSummary
    inputs: dict[str, Any]
    rows: tuple[JudgedRow, ...]
    figures: tuple[Figure, ...]
    file_stem: str = ""
    orderings: tuple[CheckedOrdering, ...] = ()

    @property
    def stem(self) -> str:
        """The beginning of the names of its files: the paper and the machines, if these are one or two.

        A slash in the name of a machine, which would be a folder, is a hyphen.
        """
        names = [name for name, _ in self.summary.machines]
        usual = "-".join([self.paper, *names]) if len(names) <= 2 else self.paper
        return (self.file_stem or usual).replace("/", "-")

    def to_json(self) -> dict[str, Any]:
        """Return inputs, rows and figures as plain values."""
        return {
            "paper": self.paper,
            **self.inputs,
            "rows": [row.to_json() for row in self.rows],
            **({"orderings": [one.to_json() for one in self.orderings]} if self.orderings else {}),
            "figures": [figure.to_json() for figure in self.figures],
        }
