"""What the ranks of test_training run; started through `meshweave.execute.ranks.launch`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gpt_training.layout import parallelism_from
from gpt_training.models import ModelSize
from gpt_training.trainer import Trainer, TrainOptions, train

from meshweave.base.errors import RankLostError

SMALL = {"num_layers": 2, "hidden": 16, "num_heads": 2, "num_kv_heads": 2, "ffn_hidden": 32, "sequence": 8}
BATCH = 8


def options_of(case: Mapping[str, Any], num_ranks: int) -> TrainOptions:
    """Return the options of a case; losses are in float64, so that another order of sums hardly shows."""
    chosen = parallelism_from(
        case.get("parallel", ""),
        num_ranks,
        batch=BATCH,
        strategy=case.get("strategy", ""),
        schedule=case.get("schedule", ""),
    )
    return TrainOptions(
        size=ModelSize(**{**SMALL, **case.get("size", {})}),
        parallelism=chosen,
        batch=BATCH,
        warmup=2,
        folder=Path(case["folder"]) if case.get("folder") else None,
        save_every=case.get("save_every", 0),
        deadline_s=case.get("deadline_s", 20.0),
        dtype=torch.float64,
    )


def _log(folder: str, name: object) -> None:
    (Path(folder) / str(name)).write_text(str(time.monotonic()))


def _die(folder: str) -> None:
    _log(folder, "killed")
    os.kill(os.getpid(), signal.SIGKILL)


def trains(context: Any, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run cases one after another. Return the losses of each, and where it began."""
    answers = []
    for case in payload["cases"]:
        trainer = Trainer(options_of(case, context.num_ranks))
        begun = trainer.resume() if case.get("resume") else None
        if "kill" in case and context.rank == case["kill"]["rank"]:
            die = threading.Timer(case["kill"]["after_s"], _die, (case["kill"]["log"],))
            die.daemon = True
            die.start()
        try:
            losses = train(trainer, case["until"])
            trainer.close()
        except RankLostError:
            _log(case["kill"]["log"], context.rank)
            raise
        answers.append({"begun": begun, "losses": losses, "waits_s": trainer.waits_s})
    return answers
