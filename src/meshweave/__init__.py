"""meshweave plans, predicts and runs the communication of distributed training.

    import meshweave as mw

Everything that a user needs is a name of this module. What is not exported here is private by convention: it may
change without notice. A name is imported at its first use, so `import meshweave` is quick, and planning and
simulation work without torch.

    describe      clusters, models, meshes, layouts and machines
    programs      what a program is written with, its text, its proof and its lowering
    algorithms    problems, configs and algorithms of every family
    planning      the search for the best algorithm, mesh, layouts and schedule
    readings      estimate, simulation, execution by numpy and torch, and traces of them
    proofs        checks of plans, programs and algorithms
    torch         products and resharding of DTensors and of local shards, pipelines of modules
    jax           products of sharded jax arrays: mw.jax.matmul2d
    pictures      timelines of traces
    errors        what a user can cause and mend
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_GROUPS = {
    "describe": {
        "describe.machine.cluster": "Cluster load_cluster",
        "describe.catalog": "cluster_names model_names",
        "describe.model": "FcLayer Transformer load_model",
        "describe.model.workload": "Workload",
        "describe.layout.mesh": "Mesh",
        "describe.layout": "Layout Partial Placement Replicate Shard StridedShard Tile",
        "describe.layout.grid": "ProcessGrid block_2d block_cyclic column_block cyclic row_block",
        "cost.machine": "Machine",
        "cost.rates": "RankRates",
        "cost.fabric": "HostTopology",
    },
    "programs": {
        "ir.program": (
            "FULL Accumulate Add AllGather AllReduce AllToAll Blocked Broadcast Buffer Call Copy Expr "
            "Fence Function Get Include Index Lane Matmul Meaning On Op Permute Product Program Put Range Recv "
            "Reduce ReduceScatter Release Repeat Same Send Statement Submesh Sum Tensor TensorPart Var View When "
            "Zero maximum minimum parse rewrite select to_text view"
        ),
        "ir.analysis.validate": "validate",
        "lower": "lower_chains lower_one_sided lower_rings read_in_place write_out_tiles",
    },
    "algorithms": {
        "algorithms.contract": "Algorithm Gradient",
        "algorithms.table": "ALGORITHMS algorithm algorithms_for",
        "algorithms.matmul2d": "Matmul2d Matmul2dConfig Matmul2dProblem",
        "algorithms.universal": "StageLimits UniversalConfig UniversalProblem universal_program",
        "algorithms.reshard": "ReshardPlan ReshardProblem TensorMove plan_reshard reshard_program",
        "algorithms.pipeline": "Action ActionKind Edge PartCost PipelineAlgorithm PipelineConfig PipelineProblem "
        "Recompute Schedule Stage Stash pipeline_program read_schedule",
        "algorithms.pipeline.action_graph": "TransferRuntime",
        "algorithms.pipeline.action_times": "ActionTimes time_schedule",
        "algorithms.pipeline.by_name": "ScheduleRequest schedule_by_name",
        "algorithms.pipeline.progress": "ScheduleDeadlock prove_progress",
        "algorithms.pipeline.torch_csv": "schedule_from_csv schedule_to_csv",
        "algorithms.pipeline.transfer_order": "list_transfers",
        "algorithms.block": "AxisRole BLOCK_ROLES BlockAlgorithm BlockConfig BlockProblem",
    },
    "planning": {
        "tune": "Plan load_plan plan_model tune_product",
        "tune.step_search": "SpaceOptions plan",
        "tune.exports": "Export export_plan",
        "tune.ranking": "RankedConfig rank_configs simulate_best",
        "tune.blocks": "BlockRanking rank_blocks",
        "tune.block_reasons": "block_reason",
        "tune.fused": "FusedChoice tune_fused",
        "tune.universal": "tune_universal",
        "tune.layouts": "tune_layouts",
        "tune.schedules": "search_schedule",
        "algorithms.step": (
            "Memory Parallelism SoftwareStack Step StepParts StepProblem StepSimulation simulate_step step "
            "step_of step_program"
        ),
    },
    "readings": {
        "estimate": "Estimate estimate",
        "simulate": "Simulation simulate",
        "simulate.critical": "CriticalPath critical_path",
        "execute.numpy": "run_numpy",
        "execute.torch.bind": "bind",
        "execute.torch.context": "TorchContext",
        "execute.memory": "open_memory",
        "execute.ranks.launch": "RankContext launch",
        "execute.torch.world": "join_ranks",
        "execute.ranks.liveness": "Liveness",
        "trace": "Span Trace",
    },
    "proofs": {
        "check": "run verify",
        "check.contract": "prove_contract",
    },
    "torch": {
        "nn.matmul": "matmul",
        "nn": "fused",
        "nn.linear": "universal_linear",
        "nn.matmul2d": "matmul2d",
        "nn.products": "prepare",
        "nn.parallel_style": "UniversalParallel",
        "nn.weights": "StoredTensor load_weights save_weights",
        "nn.step_watch": "FallingBehindWarning StepComparison StepWatch",
        "nn.reshard": "reshard",
        "nn.reshard_state": "reshard_state_dict",
        "nn.parallel.linear": "ParallelLinear",
        "nn.pipelining.pipeline": "Pipeline pipeline",
        "nn.pipelining.torch_runtime": "record_torch_actions torch_pipeline",
        "nn.parallel.model": "ParallelModel parallelize",
        "nn.parallel.structure": "LayerMap ModelMap",
        "nn.prove.differences": "Difference",
        "nn.prove.proof": "Proof prove",
        "nn.pipelining.parallel_stage": "ParallelStage",
        "nn.training.checkpoints": "Checkpoints",
        "nn.training.state": "TrainingState",
    },
    "jax": {
        "nn": "jax",
    },
    "pictures": {
        "report.timeline": "timeline_svg timeline_text",
    },
    "errors": {
        "base.errors": (
            "BindError CheckpointError DeadlineError DescriptionError LayoutError MeshweaveError PlanError "
            "ProgramError ProofError RankLostError UnsupportedError"
        ),
    },
}
"""Names by what they are for; the guide and the API reference have the same groups."""

if TYPE_CHECKING:
    from meshweave.algorithms.block import BLOCK_ROLES as BLOCK_ROLES
    from meshweave.algorithms.block import AxisRole as AxisRole
    from meshweave.algorithms.block import BlockAlgorithm as BlockAlgorithm
    from meshweave.algorithms.block import BlockConfig as BlockConfig
    from meshweave.algorithms.block import BlockProblem as BlockProblem
    from meshweave.algorithms.contract import Algorithm as Algorithm
    from meshweave.algorithms.contract import Gradient as Gradient
    from meshweave.algorithms.matmul2d import Matmul2d as Matmul2d
    from meshweave.algorithms.matmul2d import Matmul2dConfig as Matmul2dConfig
    from meshweave.algorithms.matmul2d import Matmul2dProblem as Matmul2dProblem
    from meshweave.algorithms.pipeline import Action as Action
    from meshweave.algorithms.pipeline import ActionKind as ActionKind
    from meshweave.algorithms.pipeline import Edge as Edge
    from meshweave.algorithms.pipeline import PartCost as PartCost
    from meshweave.algorithms.pipeline import PipelineAlgorithm as PipelineAlgorithm
    from meshweave.algorithms.pipeline import PipelineConfig as PipelineConfig
    from meshweave.algorithms.pipeline import PipelineProblem as PipelineProblem
    from meshweave.algorithms.pipeline import Recompute as Recompute
    from meshweave.algorithms.pipeline import Schedule as Schedule
    from meshweave.algorithms.pipeline import Stage as Stage
    from meshweave.algorithms.pipeline import Stash as Stash
    from meshweave.algorithms.pipeline import pipeline_program as pipeline_program
    from meshweave.algorithms.pipeline import read_schedule as read_schedule
    from meshweave.algorithms.pipeline.action_graph import TransferRuntime as TransferRuntime
    from meshweave.algorithms.pipeline.action_times import ActionTimes as ActionTimes
    from meshweave.algorithms.pipeline.action_times import time_schedule as time_schedule
    from meshweave.algorithms.pipeline.by_name import ScheduleRequest as ScheduleRequest
    from meshweave.algorithms.pipeline.by_name import schedule_by_name as schedule_by_name
    from meshweave.algorithms.pipeline.progress import ScheduleDeadlock as ScheduleDeadlock
    from meshweave.algorithms.pipeline.progress import prove_progress as prove_progress
    from meshweave.algorithms.pipeline.torch_csv import schedule_from_csv as schedule_from_csv
    from meshweave.algorithms.pipeline.torch_csv import schedule_to_csv as schedule_to_csv
    from meshweave.algorithms.pipeline.transfer_order import list_transfers as list_transfers
    from meshweave.algorithms.reshard import ReshardPlan as ReshardPlan
    from meshweave.algorithms.reshard import ReshardProblem as ReshardProblem
    from meshweave.algorithms.reshard import TensorMove as TensorMove
    from meshweave.algorithms.reshard import plan_reshard as plan_reshard
    from meshweave.algorithms.reshard import reshard_program as reshard_program
    from meshweave.algorithms.step import Memory as Memory
    from meshweave.algorithms.step import Parallelism as Parallelism
    from meshweave.algorithms.step import SoftwareStack as SoftwareStack
    from meshweave.algorithms.step import Step as Step
    from meshweave.algorithms.step import StepParts as StepParts
    from meshweave.algorithms.step import StepProblem as StepProblem
    from meshweave.algorithms.step import StepSimulation as StepSimulation
    from meshweave.algorithms.step import simulate_step as simulate_step
    from meshweave.algorithms.step import step as step
    from meshweave.algorithms.step import step_of as step_of
    from meshweave.algorithms.step import step_program as step_program
    from meshweave.algorithms.table import ALGORITHMS as ALGORITHMS
    from meshweave.algorithms.table import algorithm as algorithm
    from meshweave.algorithms.table import algorithms_for as algorithms_for
    from meshweave.algorithms.universal import StageLimits as StageLimits
    from meshweave.algorithms.universal import UniversalConfig as UniversalConfig
    from meshweave.algorithms.universal import UniversalProblem as UniversalProblem
    from meshweave.algorithms.universal import universal_program as universal_program
    from meshweave.base.errors import BindError as BindError
    from meshweave.base.errors import CheckpointError as CheckpointError
    from meshweave.base.errors import DeadlineError as DeadlineError
    from meshweave.base.errors import DescriptionError as DescriptionError
    from meshweave.base.errors import LayoutError as LayoutError
    from meshweave.base.errors import MeshweaveError as MeshweaveError
    from meshweave.base.errors import PlanError as PlanError
    from meshweave.base.errors import ProgramError as ProgramError
    from meshweave.base.errors import ProofError as ProofError
    from meshweave.base.errors import RankLostError as RankLostError
    from meshweave.base.errors import UnsupportedError as UnsupportedError
    from meshweave.check import run as run
    from meshweave.check import verify as verify
    from meshweave.check.contract import prove_contract as prove_contract
    from meshweave.cost.fabric import HostTopology as HostTopology
    from meshweave.cost.machine import Machine as Machine
    from meshweave.cost.rates import RankRates as RankRates
    from meshweave.describe.catalog import cluster_names as cluster_names
    from meshweave.describe.catalog import model_names as model_names
    from meshweave.describe.layout import Layout as Layout
    from meshweave.describe.layout import Partial as Partial
    from meshweave.describe.layout import Placement as Placement
    from meshweave.describe.layout import Replicate as Replicate
    from meshweave.describe.layout import Shard as Shard
    from meshweave.describe.layout import StridedShard as StridedShard
    from meshweave.describe.layout import Tile as Tile
    from meshweave.describe.layout.grid import ProcessGrid as ProcessGrid
    from meshweave.describe.layout.grid import block_2d as block_2d
    from meshweave.describe.layout.grid import block_cyclic as block_cyclic
    from meshweave.describe.layout.grid import column_block as column_block
    from meshweave.describe.layout.grid import cyclic as cyclic
    from meshweave.describe.layout.grid import row_block as row_block
    from meshweave.describe.layout.mesh import Mesh as Mesh
    from meshweave.describe.machine.cluster import Cluster as Cluster
    from meshweave.describe.machine.cluster import load_cluster as load_cluster
    from meshweave.describe.model import FcLayer as FcLayer
    from meshweave.describe.model import Transformer as Transformer
    from meshweave.describe.model import load_model as load_model
    from meshweave.describe.model.workload import Workload as Workload
    from meshweave.estimate import Estimate as Estimate
    from meshweave.estimate import estimate as estimate
    from meshweave.execute.memory import open_memory as open_memory
    from meshweave.execute.numpy import run_numpy as run_numpy
    from meshweave.execute.ranks.launch import RankContext as RankContext
    from meshweave.execute.ranks.launch import launch as launch
    from meshweave.execute.ranks.liveness import Liveness as Liveness
    from meshweave.execute.torch.bind import bind as bind
    from meshweave.execute.torch.context import TorchContext as TorchContext
    from meshweave.execute.torch.world import join_ranks as join_ranks
    from meshweave.ir.analysis.validate import validate as validate
    from meshweave.ir.program import FULL as FULL
    from meshweave.ir.program import Accumulate as Accumulate
    from meshweave.ir.program import Add as Add
    from meshweave.ir.program import AllGather as AllGather
    from meshweave.ir.program import AllReduce as AllReduce
    from meshweave.ir.program import AllToAll as AllToAll
    from meshweave.ir.program import Blocked as Blocked
    from meshweave.ir.program import Broadcast as Broadcast
    from meshweave.ir.program import Buffer as Buffer
    from meshweave.ir.program import Call as Call
    from meshweave.ir.program import Copy as Copy
    from meshweave.ir.program import Expr as Expr
    from meshweave.ir.program import Fence as Fence
    from meshweave.ir.program import Function as Function
    from meshweave.ir.program import Get as Get
    from meshweave.ir.program import Include as Include
    from meshweave.ir.program import Index as Index
    from meshweave.ir.program import Lane as Lane
    from meshweave.ir.program import Matmul as Matmul
    from meshweave.ir.program import Meaning as Meaning
    from meshweave.ir.program import On as On
    from meshweave.ir.program import Op as Op
    from meshweave.ir.program import Permute as Permute
    from meshweave.ir.program import Product as Product
    from meshweave.ir.program import Program as Program
    from meshweave.ir.program import Put as Put
    from meshweave.ir.program import Range as Range
    from meshweave.ir.program import Recv as Recv
    from meshweave.ir.program import Reduce as Reduce
    from meshweave.ir.program import ReduceScatter as ReduceScatter
    from meshweave.ir.program import Release as Release
    from meshweave.ir.program import Repeat as Repeat
    from meshweave.ir.program import Same as Same
    from meshweave.ir.program import Send as Send
    from meshweave.ir.program import Statement as Statement
    from meshweave.ir.program import Submesh as Submesh
    from meshweave.ir.program import Sum as Sum
    from meshweave.ir.program import Tensor as Tensor
    from meshweave.ir.program import TensorPart as TensorPart
    from meshweave.ir.program import Var as Var
    from meshweave.ir.program import View as View
    from meshweave.ir.program import When as When
    from meshweave.ir.program import Zero as Zero
    from meshweave.ir.program import maximum as maximum
    from meshweave.ir.program import minimum as minimum
    from meshweave.ir.program import parse as parse
    from meshweave.ir.program import rewrite as rewrite
    from meshweave.ir.program import select as select
    from meshweave.ir.program import to_text as to_text
    from meshweave.ir.program import view as view
    from meshweave.lower import lower_chains as lower_chains
    from meshweave.lower import lower_one_sided as lower_one_sided
    from meshweave.lower import lower_rings as lower_rings
    from meshweave.lower import read_in_place as read_in_place
    from meshweave.lower import write_out_tiles as write_out_tiles
    from meshweave.nn import fused as fused
    from meshweave.nn import jax as jax
    from meshweave.nn.linear import universal_linear as universal_linear
    from meshweave.nn.matmul import matmul as matmul
    from meshweave.nn.matmul2d import matmul2d as matmul2d
    from meshweave.nn.parallel.linear import ParallelLinear as ParallelLinear
    from meshweave.nn.parallel.model import ParallelModel as ParallelModel
    from meshweave.nn.parallel.model import parallelize as parallelize
    from meshweave.nn.parallel.structure import LayerMap as LayerMap
    from meshweave.nn.parallel.structure import ModelMap as ModelMap
    from meshweave.nn.parallel_style import UniversalParallel as UniversalParallel
    from meshweave.nn.pipelining.parallel_stage import ParallelStage as ParallelStage
    from meshweave.nn.pipelining.pipeline import Pipeline as Pipeline
    from meshweave.nn.pipelining.pipeline import pipeline as pipeline
    from meshweave.nn.pipelining.torch_runtime import record_torch_actions as record_torch_actions
    from meshweave.nn.pipelining.torch_runtime import torch_pipeline as torch_pipeline
    from meshweave.nn.products import prepare as prepare
    from meshweave.nn.prove.differences import Difference as Difference
    from meshweave.nn.prove.proof import Proof as Proof
    from meshweave.nn.prove.proof import prove as prove
    from meshweave.nn.reshard import reshard as reshard
    from meshweave.nn.reshard_state import reshard_state_dict as reshard_state_dict
    from meshweave.nn.step_watch import FallingBehindWarning as FallingBehindWarning
    from meshweave.nn.step_watch import StepComparison as StepComparison
    from meshweave.nn.step_watch import StepWatch as StepWatch
    from meshweave.nn.training.checkpoints import Checkpoints as Checkpoints
    from meshweave.nn.training.state import TrainingState as TrainingState
    from meshweave.nn.weights import StoredTensor as StoredTensor
    from meshweave.nn.weights import load_weights as load_weights
    from meshweave.nn.weights import save_weights as save_weights
    from meshweave.report.timeline import timeline_svg as timeline_svg
    from meshweave.report.timeline import timeline_text as timeline_text
    from meshweave.simulate import Simulation as Simulation
    from meshweave.simulate import simulate as simulate
    from meshweave.simulate.critical import CriticalPath as CriticalPath
    from meshweave.simulate.critical import critical_path as critical_path
    from meshweave.trace import Span as Span
    from meshweave.trace import Trace as Trace
    from meshweave.tune import Plan as Plan
    from meshweave.tune import load_plan as load_plan
    from meshweave.tune import plan_model as plan_model
    from meshweave.tune import tune_product as tune_product
    from meshweave.tune.block_reasons import block_reason as block_reason
    from meshweave.tune.blocks import BlockRanking as BlockRanking
    from meshweave.tune.blocks import rank_blocks as rank_blocks
    from meshweave.tune.exports import Export as Export
    from meshweave.tune.exports import export_plan as export_plan
    from meshweave.tune.fused import FusedChoice as FusedChoice
    from meshweave.tune.fused import tune_fused as tune_fused
    from meshweave.tune.layouts import tune_layouts as tune_layouts
    from meshweave.tune.ranking import RankedConfig as RankedConfig
    from meshweave.tune.ranking import rank_configs as rank_configs
    from meshweave.tune.ranking import simulate_best as simulate_best
    from meshweave.tune.schedules import search_schedule as search_schedule
    from meshweave.tune.step_search import SpaceOptions as SpaceOptions
    from meshweave.tune.step_search import plan as plan
    from meshweave.tune.universal import tune_universal as tune_universal

_HOME = {
    name: module for names in _GROUPS.values() for module, line in names.items() for name in line.split()
}

_MOVED = {
    name: package
    for package, names in {
        "meshweave_lab": "Lab PlacedProduct dtensor_traffics paced",
        "meshweave_studies.matrix": (
            "CommunicationMatrix MatrixLayer MeasuredBandwidth MeshBandwidth MeshTime communication_matrix "
            "load_matrix mesh_bandwidth rank_meshes"
        ),
    }.items()
    for name in names.split()
}
"""Names that another package of the repository has now; for one version they are to be had here too."""

__all__ = ["__version__", *sorted(_HOME)]


class _FrontDoor(ModuleType):
    """This module. `estimate` and `simulate` are its functions, not the subpackages that bear the same names.

    Python sets a subpackage as an attribute of its parent when it is imported, which would hide the function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _MOVED:
            return _moved(name)
        if name not in _HOME:
            raise AttributeError(f"module 'meshweave' has no attribute '{name}'")
        value = getattr(import_module(f"meshweave.{_HOME[name]}"), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted([*vars(self), *_HOME])


def _moved(name: str) -> Any:
    package = _MOVED[name]
    warnings.warn(f"meshweave.{name} is {package}.{name} now", DeprecationWarning, stacklevel=3)
    try:
        return getattr(import_module(package), name)
    except ModuleNotFoundError as error:
        raise AttributeError(f"meshweave.{name} is {package}.{name} now: {error}") from None


sys.modules[__name__].__class__ = _FrontDoor
