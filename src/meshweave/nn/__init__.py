"""For torch: products of local shards, layers placed by hand, maps of models, and what ranks run in.

`meshweave.matmul` is the product of DTensors, and `meshweave.parallelize` puts a plan into a model. Here is what
they are made of, to be placed by hand: `matmul2d`, `universal_linear`, fused linear layers, `ParallelLinear`.

The package itself imports neither torch nor jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshweave.base.lazy import lazy_names

if TYPE_CHECKING:
    from meshweave.execute.memory import open_memory as open_memory
    from meshweave.execute.ranks.job import RankContext as RankContext
    from meshweave.execute.ranks.liveness import Liveness as Liveness
    from meshweave.execute.torch.bind import bind as bind
    from meshweave.execute.torch.world import join_ranks as join_ranks
    from meshweave.nn.experts import DispatchHandle as DispatchHandle
    from meshweave.nn.experts import ExpertExchange as ExpertExchange
    from meshweave.nn.fused import all_gather_linear as all_gather_linear
    from meshweave.nn.fused import linear_reduce_scatter as linear_reduce_scatter
    from meshweave.nn.grouped_product import grouped_product as grouped_product
    from meshweave.nn.hosted.trainer import accelerate_config as accelerate_config
    from meshweave.nn.linear import universal_linear as universal_linear
    from meshweave.nn.matmul2d import matmul2d as matmul2d
    from meshweave.nn.parallel.linear import ParallelLinear as ParallelLinear
    from meshweave.nn.parallel.machine_here import MeasuredStep as MeasuredStep
    from meshweave.nn.parallel.machine_here import measure_step as measure_step
    from meshweave.nn.parallel.machine_here import measured_problem as measured_problem
    from meshweave.nn.parallel.machine_here import step_here_s as step_here_s
    from meshweave.nn.parallel.model import ParallelModel as ParallelModel
    from meshweave.nn.parallel.planned_here import fastest_here as fastest_here
    from meshweave.nn.parallel.structure import LayerMap as LayerMap
    from meshweave.nn.parallel.structure import ModelMap as ModelMap
    from meshweave.nn.parallel.trials import Trial as Trial
    from meshweave.nn.parallel.trials import Trials as Trials
    from meshweave.nn.parallel.trials import TrialTable as TrialTable
    from meshweave.nn.parallel.trials import run_trials as run_trials
    from meshweave.nn.parallel.units import FeatureUnits as FeatureUnits
    from meshweave.nn.parallel_style import UniversalParallel as UniversalParallel
    from meshweave.nn.pipelining.parallel_stage import ParallelStage as ParallelStage
    from meshweave.nn.pipelining.pipeline import Pipeline as Pipeline
    from meshweave.nn.pipelining.torch_runtime import record_torch_actions as record_torch_actions
    from meshweave.nn.pipelining.torch_runtime import torch_pipeline as torch_pipeline
    from meshweave.nn.products import prepare as prepare
    from meshweave.nn.prove.differences import Difference as Difference
    from meshweave.nn.prove.proof import Proof as Proof
    from meshweave.nn.reshard_state import reshard_state_dict as reshard_state_dict
    from meshweave.nn.step_watch import FallingBehindWarning as FallingBehindWarning
    from meshweave.nn.step_watch import StepComparison as StepComparison
    from meshweave.nn.training.state import TrainingState as TrainingState
    from meshweave.nn.weights import StoredTensor as StoredTensor

__all__ = lazy_names(__name__)
