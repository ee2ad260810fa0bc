"""The discrete-event reading of a program; tests hold it against a simulator in plain Python."""

from meshweave.simulate.engine import simulate as simulate
from meshweave.simulate.result import LinkUse as LinkUse
from meshweave.simulate.result import Simulation as Simulation
