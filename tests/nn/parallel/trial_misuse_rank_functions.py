"""What ranks do in tests of trials that are given something wrong, or lose a rank."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import reference_models
import torch
import torch.distributed as dist
from torch import nn

from meshweave.base.errors import MeshweaveError
from meshweave.execute.ranks.job import RankContext
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.parallel.model import ParallelModel
from meshweave.nn.parallel.parallelize import parallelize
from meshweave.nn.parallel.trials import Trials

ODD = 1
Way = Callable[[SimpleNamespace], None]


def _set(**values: Any) -> Way:
    return lambda given: given.options.update(values)


def _change(name: str, change: Callable[[Any], Any]) -> Way:
    return lambda given: given.options.update({name: change(given.options[name])})


def _raise_in_step(given: SimpleNamespace) -> None:
    def fail(count: int) -> None:
        raise OSError("the disk of this rank is full")

    given.in_step = fail


def _kept_in(words: str) -> Way:
    def change(given: SimpleNamespace) -> None:
        path = given.folder / f"{abs(hash(words))}.json"
        path.write_text(words, encoding="utf-8")
        given.options["results"] = path

    return change


def _folder(*parts: str) -> Way:
    return lambda given: given.options.update(results=given.folder.joinpath(*parts))


def _without_parameters(given: SimpleNamespace) -> None:
    given.model = nn.Identity()


BY_ONE: dict[str, tuple[Way, str]] = {
    "other plans": (_set(plans=[("all_to_all_heads", None)]), "other trials"),
    "fewer plans": (_set(most=1), "other trials"),
    "other steps": (_set(steps=2), "other trials"),
    "a sequence more": (_change("tokens", lambda t: torch.cat([t, t])), "other"),
    "other tokens": (_change("tokens", lambda t: t.flip(0)), "other tokens"),
    "an error in a step": (_raise_in_step, "OSError"),
}
"""What one rank has otherwise, and a word of the error on all."""
BY_ALL: dict[str, tuple[Way, str]] = {
    "no rows": (
        lambda g: g.options.update(tokens=g.options["tokens"][:0], targets=g.options["targets"][:0]),
        "no plan could be tried",
    ),
    "real tokens": (_change("tokens", lambda t: t.float()), "no plan could be tried"),
    "words that are not there": (_change("tokens", lambda t: t + 10_000), "no plan could be tried"),
    "targets of other tokens": (_change("targets", lambda t: t[:, :-1]), "no plan could be tried"),
    "tokens in a list": (_change("tokens", lambda t: t.tolist()), "tensors"),
    "no trials": (_set(most=0), "at least 1"),
    "steps below none": (_set(steps=-1), "steps"),
    "half a step": (_set(steps=1.5), "steps"),
    "seconds that are no number": (_set(seconds=float("nan")), "seconds"),
    "a share below none": (_set(within=-0.1), "within"),
    "a plan alone": (_set(plans=["megatron"]), "pair"),
    "seconds in words": (_set(plans=[("megatron", "fast")]), "pair"),
    "a folder for a file": (_folder(), "no file of kept trials"),
    "a folder that is not there": (_folder("none", "kept.json"), "no such folder"),
    "a file of something else": (_kept_in("[]"), "no file of kept trials"),
    "rows of something else": (_kept_in('{"trials": [1]}'), "no file of kept trials"),
    "times of something else": (
        _kept_in('{"trials": [{"kind": "data", "predicted_s": 1.0, "measured_s": "x"}]}'),
        "no file of kept trials",
    ),
    "a file without end": (_kept_in("[" * 100_000), "no file of kept trials"),
    "a model without parameters": (_without_parameters, "parameters"),
}
"""What all ranks give wrongly."""
TABLES = {"one": BY_ONE, "all": BY_ALL}


def _given(num_ranks: int, folder: Path) -> SimpleNamespace:
    torch.manual_seed(0)
    model = reference_models.make("plain llama").float()
    tokens, targets = torch.randint(0, reference_models.words(model), (2, 2 * num_ranks, 8))
    options = {"tokens": tokens, "targets": targets, "most": 4, "steps": 1}
    return SimpleNamespace(model=model, options=options, folder=folder, in_step=lambda count: None)


def _tried(given: SimpleNamespace, torch_context: TorchContext) -> None:
    """Try plans; `in_step` is called in each step of a trial, with how many there were."""
    own, counts = ParallelModel.step, itertools.count(1)

    def step(model: ParallelModel, *args: Any) -> Any:
        given.in_step(next(counts))
        return own(model, *args)

    with mock.patch.object(ParallelModel, "step", step):
        parallelize(given.model, "auto", trials=Trials(**given.options), check=False, context=torch_context)


def misuse(context: RankContext, payload: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return for each way of a table what this rank was told, and after how many seconds."""
    torch.set_num_threads(1)
    said = {}
    for name, (change, _) in TABLES[payload["table"]].items():
        dist.barrier()
        torch_context = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
        given = _given(context.num_ranks, Path(payload["folder"]))
        if payload["table"] == "all" or context.rank == ODD:
            change(given)
        began = time.monotonic()
        try:
            _tried(given, torch_context)
            answer: dict[str, Any] = {"error": "", "text": ""}
        except MeshweaveError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        except Exception as error:
            answer = {"error": f"raw {type(error).__name__}", "text": traceback.format_exc()[-900:]}
        said[name] = answer | {"seconds": time.monotonic() - began}
        torch_context.close()
    return said


def die_in_a_trial(context: RankContext, payload: Mapping[str, Any]) -> None:
    """Try plans; the odd rank ends or stops itself in a step, and others write what they are told."""
    torch.set_num_threads(1)
    torch_context = TorchContext(liveness=context.liveness, deadline_s=payload["deadline_s"])
    given = _given(context.num_ranks, Path(payload["folder"]))
    begun: list[float] = []

    def die(count: int) -> None:
        begun.append(time.monotonic())
        if context.rank == ODD and count == payload["call"]:
            os.kill(os.getpid(), getattr(signal, payload["signal"]))

    given.in_step = die
    try:
        _tried(given, torch_context)
    except MeshweaveError as error:
        said = [type(error).__name__, list(getattr(error, "missing", ())), time.monotonic() - begun[-1]]
        Path(payload["folder"], f"{context.rank}.json").write_text(json.dumps(said))
        raise
