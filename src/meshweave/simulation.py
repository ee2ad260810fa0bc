"""For who simulates a cluster: rates of ranks and hosts, results of estimates and simulations, pictures of traces.

    trace = mw.simulate(program, mw.Machine.of(mw.load_cluster("tpu-v4:2x2"), program))
    print(mw.simulation.timeline_text(trace))

`simulate_step` simulates a whole training step. What a machine is made of stands in the files of its cluster.
"""

from meshweave.algorithms.step import StepSimulation as StepSimulation
from meshweave.algorithms.step import simulate_step as simulate_step
from meshweave.base import lazy
from meshweave.cost.fabric import HostTopology as HostTopology
from meshweave.cost.rates import RankRates as RankRates
from meshweave.estimate import Estimate as Estimate
from meshweave.report.timeline import timeline_svg as timeline_svg
from meshweave.report.timeline import timeline_text as timeline_text
from meshweave.simulate import Simulation as Simulation
from meshweave.simulate.critical import CriticalPath as CriticalPath
from meshweave.simulate.critical import critical_path as critical_path
from meshweave.trace import Span as Span

__all__ = lazy.imported_names(__name__)
