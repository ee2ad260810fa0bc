"""A cluster in a box: hosts as network namespaces, links as veth pairs with a rate, real sockets on them.

`Lab.load("LAB.toml")` is a description; `with lab.up() as running` is the machine.
"""

from meshweave.lab.description import LabDescription
from meshweave.lab.description_file import load_lab
from meshweave.lab.lab import Lab, RunningLab
from meshweave.lab.network.check import Abilities, abilities
from meshweave.lab.processes import RunResult

__all__ = ["Abilities", "Lab", "LabDescription", "RunResult", "RunningLab", "abilities", "load_lab"]
