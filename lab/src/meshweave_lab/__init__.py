"""A cluster in a box: hosts as network namespaces, links as veth pairs with a rate, real sockets on them.

`Lab.load("LAB.toml")` is a description; `with lab.up() as running` is the machine.
"""

from meshweave_lab.bench.dtensor_traffic import PlacedProduct, dtensor_traffics
from meshweave_lab.description import LabDescription
from meshweave_lab.description_file import load_lab
from meshweave_lab.lab import Lab, RunningLab
from meshweave_lab.network.check import Abilities, abilities
from meshweave_lab.pace import Pacer, paced
from meshweave_lab.processes import RunResult

__all__ = [
    "Abilities",
    "Lab",
    "LabDescription",
    "Pacer",
    "PlacedProduct",
    "RunResult",
    "RunningLab",
    "abilities",
    "dtensor_traffics",
    "load_lab",
    "paced",
]
