"""meshweave plans, predicts and runs the communication of distributed training.

    import meshweave as mw

What most programs need is a name of this module:

    describe      the catalog, clusters, models, meshes, layouts and machines
    programs      programs, their text and their proof
    algorithms    the table of algorithms and their contract
    planning      the search for the best degrees, layouts and schedule; plans in the words of other software
    readings      estimate, simulation, execution by numpy and torch, and traces of them
    torch         products and resharding of DTensors, models and pipelines by a plan, checkpoints
    proofs        checks of plans, programs and models
    messages      the base of errors that a user can cause and mend (`meshweave.errors` has them all), and the log

The rest stands in namespaces, each a module that says what it is for:

    mw.describe      strided and tiled placements, process grids
    mw.ir            what a program is written with
    mw.lower         passes that rewrite a program into the ops of a transport
    mw.algorithms    the whole table, problems and configs of every family, for authors of algorithms
    mw.schedules     schedules of pipelines
    mw.tune          searches of one family, plan files
    mw.simulation    rates, results, critical paths and pictures, for who simulates a cluster
    mw.nn            products of local shards, layers placed by hand, what ranks run in
    mw.jax           products of sharded jax arrays
    mw.errors        every error that a user can cause and mend

What is neither here nor in a namespace is private by convention: it may change without notice. A name is imported
at its first use, so `import meshweave` is quick, and planning and simulation work without torch.
"""

from __future__ import annotations

from meshweave.base.lazy import lazy_names

TYPE_CHECKING = False  # what type checkers take for true, without `typing`

__version__ = "0.1.0"

_GROUPS = {
    "describe": (
        "clusters models Cluster load_cluster Transformer load_model Workload Mesh Layout Partial "
        "Replicate Shard Machine"
    ),
    "programs": "Program parse validate",
    "algorithms": "Algorithm algorithm prove_contract",
    "planning": "export Plan rank plan Parallelism SoftwareStack step",
    "readings": "estimate simulate run_numpy TorchContext launch Trace",
    "torch": "matmul reshard parallelize pipeline Checkpoints load_weights save_weights StepWatch",
    "proofs": "run verify prove",
    "messages": "MeshweaveError set_log_level",
}
"""Names by what they are for; the guide and the API reference have the same groups."""

_NAMESPACES = (
    "errors",
    "ir",
    "lower",
    "describe",
    "algorithms",
    "schedules",
    "tune",
    "simulation",
    "nn",
    "jax",
)

if TYPE_CHECKING:
    from meshweave import algorithms as algorithms
    from meshweave import describe as describe
    from meshweave import errors as errors
    from meshweave import ir as ir
    from meshweave import jax as jax
    from meshweave import lower as lower
    from meshweave import nn as nn
    from meshweave import schedules as schedules
    from meshweave import simulation as simulation
    from meshweave import tune as tune
    from meshweave.algorithms.contract import Algorithm as Algorithm
    from meshweave.algorithms.step import Parallelism as Parallelism
    from meshweave.algorithms.step import SoftwareStack as SoftwareStack
    from meshweave.algorithms.step import step as step
    from meshweave.algorithms.table import algorithm as algorithm
    from meshweave.base.errors import MeshweaveError as MeshweaveError
    from meshweave.base.log import set_log_level as set_log_level
    from meshweave.check import run as run
    from meshweave.check import verify as verify
    from meshweave.check.contract import prove_contract as prove_contract
    from meshweave.cost.machine import Machine as Machine
    from meshweave.describe.catalog import clusters as clusters
    from meshweave.describe.catalog import models as models
    from meshweave.describe.layout import Layout as Layout
    from meshweave.describe.layout import Partial as Partial
    from meshweave.describe.layout import Replicate as Replicate
    from meshweave.describe.layout import Shard as Shard
    from meshweave.describe.layout.mesh import Mesh as Mesh
    from meshweave.describe.machine.cluster import Cluster as Cluster
    from meshweave.describe.machine.cluster import load_cluster as load_cluster
    from meshweave.describe.model import Transformer as Transformer
    from meshweave.describe.model import load_model as load_model
    from meshweave.describe.model.workload import Workload as Workload
    from meshweave.estimate import estimate as estimate
    from meshweave.execute.numpy import run_numpy as run_numpy
    from meshweave.execute.ranks.launch import launch as launch
    from meshweave.execute.torch.context import TorchContext as TorchContext
    from meshweave.ir.analysis.validate import validate as validate
    from meshweave.ir.program import Program as Program
    from meshweave.ir.program import parse as parse
    from meshweave.nn.matmul import matmul as matmul
    from meshweave.nn.parallel.parallelize import parallelize as parallelize
    from meshweave.nn.pipelining.pipeline import pipeline as pipeline
    from meshweave.nn.prove.proof import prove as prove
    from meshweave.nn.reshard import reshard as reshard
    from meshweave.nn.step_watch import StepWatch as StepWatch
    from meshweave.nn.training.checkpoints import Checkpoints as Checkpoints
    from meshweave.nn.weights import load_weights as load_weights
    from meshweave.nn.weights import save_weights as save_weights
    from meshweave.simulate import simulate as simulate
    from meshweave.trace import Trace as Trace
    from meshweave.tune.exports import export as export
    from meshweave.tune.plan import Plan as Plan
    from meshweave.tune.ranking import rank as rank
    from meshweave.tune.step_search import plan as plan

_MOVED = {
    "meshweave": "cluster_names=clusters export_plan=export fused=nn model_names=models rank_configs=rank",
    "meshweave.errors": (
        "BindError CheckpointError DeadlineError DescriptionError LayoutError PlanError ProgramError "
        "ProofError RankLostError UnsupportedError"
    ),
    "meshweave.ir": (
        "FULL Accumulate Add AllGather AllReduce AllToAll Blocked Broadcast Buffer Call Copy Expr Fence "
        "Function Get Include Index Lane Matmul Meaning On Op Permute Product Put Range Recv Reduce "
        "ReduceScatter Release Repeat Same Send Statement Submesh Sum Tensor TensorPart Var View When "
        "Zero maximum minimum rewrite select to_text view"
    ),
    "meshweave.lower": "lower_chains lower_one_sided lower_rings lower_small_sums read_in_place write_out_tiles",
    "meshweave.describe": (
        "block_2d block_cyclic column_block cyclic FcLayer Placement ProcessGrid row_block StridedShard Tile"
    ),
    "meshweave.algorithms": (
        "ALGORITHMS algorithms_for AxisRole BLOCK_ROLES BlockAlgorithm BlockConfig BlockProblem Gradient Matmul2d "
        "Matmul2dConfig Matmul2dProblem Memory plan_reshard reshard_program ReshardPlan ReshardProblem "
        "StageLimits Step step_of step_program StepParts StepProblem TensorMove universal_program "
        "UniversalConfig UniversalProblem"
    ),
    "meshweave.schedules": (
        "Action ActionKind ActionTimes Edge list_transfers PartCost pipeline_program PipelineAlgorithm "
        "PipelineConfig PipelineProblem prove_progress Recompute Schedule schedule_by_name "
        "schedule_from_csv schedule_to_csv ScheduleDeadlock ScheduleRequest Stage Stash time_schedule "
        "TransferRuntime"
    ),
    "meshweave.tune": (
        "Export FusedChoice load_plan plan_model RankedConfig simulate_best SpaceOptions tune_fused tune_product "
        "tune_universal"
    ),
    "meshweave.simulation": (
        "critical_path CriticalPath Estimate HostTopology RankRates simulate_step Simulation Span StepSimulation "
        "timeline_svg timeline_text"
    ),
    "meshweave.nn": (
        "bind Difference FallingBehindWarning join_ranks LayerMap Liveness matmul2d ModelMap open_memory "
        "ParallelLinear ParallelModel ParallelStage Pipeline prepare Proof RankContext "
        "record_torch_actions reshard_state_dict StepComparison StoredTensor torch_pipeline "
        "TrainingState universal_linear UniversalParallel"
    ),
    "meshweave_lab": "Lab PlacedProduct dtensor_traffics paced",
    "meshweave_studies.blocks.ranking": "BlockRanking rank_blocks",
    "meshweave_studies.blocks.reasons": "block_reason",
    "meshweave_studies.slicing.layouts": "tune_layouts",
    "meshweave_studies.slicing.schedules": "search_schedule",
    "meshweave_studies.matrix": (
        "CommunicationMatrix MatrixLayer MeasuredBandwidth MeshBandwidth MeshTime communication_matrix "
        "load_matrix mesh_bandwidth rank_meshes"
    ),
}
"""Names that stand elsewhere now, by where: see `lazy_names`."""


__all__ = [
    "__version__",
    *_NAMESPACES,
    *lazy_names(__name__, moved=_MOVED, modules=_NAMESPACES),
]
