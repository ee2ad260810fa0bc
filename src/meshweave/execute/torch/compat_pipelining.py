"""The private names of `torch.distributed.pipelining` that meshweave uses, each behind one documented function.

The second part of `compat`, under the same rules, with one difference: these names were compared with torch 2.13
alone. torch has no public name for them. One that is gone raises an UnsupportedError with the version of torch.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from meshweave.execute.torch.compat import _missing, _private

_PIPELINING = "torch.distributed.pipelining"


def stage_backward() -> Any:
    """Return torch's function `(outputs, grads, inputs)` that runs a whole backward and returns input gradients.

    It also adds the gradients of parameters to their `.grad`. Relies on `_backward.stage_backward` (torch 2.13),
    which torch's own pipeline stages run.

    Raises:
        UnsupportedError: the function is gone.
    """
    return _private(f"{_PIPELINING}._backward", "stage_backward")


def stage_backward_input() -> Any:
    """Return torch's function `(outputs, grads, inputs, parameters)` that computes gradients of inputs alone.

    It returns (input gradients, groups of parameters for `stage_backward_weight`). A group is a dict with the
    gradients ("grads") at the autograd nodes ("intermediates") from which the gradients of its parameters
    follow. It detaches the outputs in place. Relies on `_backward.stage_backward_input` (torch 2.13).

    Raises:
        UnsupportedError: the function is gone.
    """
    return _private(f"{_PIPELINING}._backward", "stage_backward_input")


def stage_backward_weight() -> Any:
    """Return torch's function `(parameters, groups)` that adds the gradients of parameters to their `.grad`.

    `groups` comes from `stage_backward_input`. Relies on `_backward.stage_backward_weight` (torch 2.13).

    Raises:
        UnsupportedError: the function is gone.
    """
    return _private(f"{_PIPELINING}._backward", "stage_backward_weight")


def pipeline_runtime(stages: Sequence[Any], num_micro_batches: int, **options: Any) -> Any:
    """Return torch's pipeline runtime for these stages, not yet given a list of actions.

    Relies on `schedules._PipelineScheduleRuntime(stages, n_microbatches, ...)` (torch 2.13).

    Args:
        options: further arguments of that class.

    Raises:
        UnsupportedError: the class is gone.
    """
    return _private(f"{_PIPELINING}.schedules", "_PipelineScheduleRuntime")(
        list(stages), num_micro_batches, **options
    )


def load_pipeline_csv(runtime: Any, path: str, form: str) -> None:
    """Have torch's pipeline runtime run the actions of the CSV file at `path`.

    `form` is "compute_only", for a file without sends and receives, or "compute_comms", for one with them.

    Relies on `_PipelineScheduleRuntime._load_csv(filename, format)` (torch 2.13).

    Raises:
        UnsupportedError: the method is gone.
    """
    load = getattr(runtime, "_load_csv", None)
    if load is None:
        raise _missing(f"{_PIPELINING}.schedules._PipelineScheduleRuntime._load_csv")
    load(path, form)


@contextlib.contextmanager
def observe_pipeline_actions(
    watch: Callable[[str], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Run each action of torch's pipeline runtime inside `watch(action)`; `action` is its text in CSV, as "2F0".

    Replaces `schedules.record_function`, in which the runtime runs each action under the name "PP:2F0", for the
    time of the block (torch 2.13).

    Raises:
        UnsupportedError: the function is gone.
    """
    module: Any = importlib.import_module(f"{_PIPELINING}.schedules")
    record_function = getattr(module, "record_function", None)
    if record_function is None:
        raise _missing(f"{_PIPELINING}.schedules.record_function")

    @contextlib.contextmanager
    def watched(name: str) -> Iterator[None]:
        with record_function(name), watch(name.removeprefix("PP:")):
            yield

    module.record_function = watched
    try:
        yield
    finally:
        module.record_function = record_function


def storage_key(tensor: Tensor) -> int:
    """Return a number for the storage of a tensor, which no other storage has while this one lives.

    Relies on `UntypedStorage._cdata` (torch 2.13): storages of the meta device have no address.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd tracks a tensor as a view of another one, so that it cannot be detached in place.

    Relies on `Tensor._is_view` (torch 2.13).
    """
    return bool(tensor._is_view())
