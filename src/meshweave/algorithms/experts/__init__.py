"""Layers of experts: dispatch, grouped products and combine, by rows that are counted at run time."""

from __future__ import annotations

from meshweave.algorithms.experts.direct import DirectAllToAll as DirectAllToAll
from meshweave.algorithms.experts.fused import FusedExperts as FusedExperts
from meshweave.algorithms.experts.fused import TokenSlices as TokenSlices
from meshweave.algorithms.experts.hierarchical import HierarchicalExperts as HierarchicalExperts
from meshweave.algorithms.experts.pairwise import PairwiseRounds as PairwiseRounds
from meshweave.algorithms.experts.problem import ExpertsProblem as ExpertsProblem
from meshweave.algorithms.experts.put import PutToOwner as PutToOwner
from meshweave.algorithms.experts.routing import Routing as Routing

ENTRIES = (DirectAllToAll(), PairwiseRounds(), PutToOwner(), HierarchicalExperts(), FusedExperts())
