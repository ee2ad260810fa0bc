"""Schedules of pipelines: actions of stages, in text and tables, timed and proved to make progress.

    schedule = mw.schedules.schedule_by_name("1f1b", mw.schedules.ScheduleRequest(4, 8))
    times = mw.schedules.time_schedule(schedule, ...)

A new schedule derives from `PipelineAlgorithm`. `meshweave.pipeline` runs one on modules of torch.
"""

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
from meshweave.base import lazy

__all__ = lazy.imported_names(__name__)
