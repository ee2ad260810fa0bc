"""`meshweave.pipeline` on real processes: losses and gradients are those of the unpipelined model."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
import torch
from sections import launched

from meshweave.base.errors import LayoutError, RankLostError, UnsupportedError
from meshweave.execute.ranks.launch import launch
from meshweave.execute.torch.context import TorchContext
from meshweave.nn.parallel.optimizers import GradientProbe
from meshweave.nn.parallel.tokens import TokenLimits
from meshweave.nn.pipelining import parallel_stage, stage_words
from meshweave.nn.pipelining.gradients import LossSum, StageGradients, num_loss_elements
from meshweave.nn.pipelining.parallel_stage import ParallelStage
from meshweave.nn.pipelining.pipeline import Pipeline
from meshweave.nn.pipelining.plan import kind_of_micro_batch
from meshweave.nn.pipelining.stage_functions import StageFunctions, StageShape, StageStep, TensorKind
from shared_launch import SharedLaunch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
RANKS = "pipeline_rank_functions"

SECTIONS = {
    "two schedules on a GPT": "few_schedules",
    "skip connections": "u_shaped",
    "in torch's runtime": "torch_schedules",
    "data beside tensor parallelism": "different_layouts",
    "losses of forwards alone": "evaluations",
    "what does not fit": "refusals",
    "a table that ends share unevenly": "pipeline_state_rank_functions:tied_and_uneven",
    "a weight that stages share": "pipeline_state_rank_functions:shared_by_stages",
    "a weight that stages share, summed early": "pipeline_state_rank_functions:shared_and_reduced_early",
    "parameters that are trained later": "pipeline_state_rank_functions:changed_parameters",
    "parameters that are frozen later": "pipeline_state_rank_functions:frozen_where_summed",
    "gradients that are held": "pipeline_state_rank_functions:held_gradients",
    "a step within a step": "pipeline_state_rank_functions:stepped_within",
    "the threads of stages": "pipeline_state_rank_functions:calling_threads",
    "statistics of a stage that runs again": "pipeline_state_rank_functions:statistics_once",
    "steps that fail": "pipeline_state_rank_functions:failed_steps",
    "stages that run whole": "pipeline_odd_rank_functions:odd_stages",
    "parameters that rows do not reach": "pipeline_odd_rank_functions:missing_gradients",
    "what does not run in parts": "pipeline_odd_rank_functions:refused_in_parts",
    "what is given wrongly": "pipeline_state_rank_functions:given_wrongly",
}
MORE_SECTIONS = {
    "every schedule on a GPT": "every_schedule",
    "data parallelism": "data_parallel",
    "one-byte signals": "signals",
    "a CSV file": "plans",
}


@pytest.fixture(scope="module")
def answers(launch_once: SharedLaunch) -> list[dict[str, list[str]]]:
    """One launch for all that ends well: starting processes is what takes time."""
    return launched(launch_once, f"{RANKS}:sections", SECTIONS, HERE)


@pytest.mark.gloo
@pytest.mark.parametrize("section", SECTIONS)
def test_gradients_are_those_of_the_unpipelined_model(
    section: str, answers: list[dict[str, list[str]]]
) -> None:
    assert [answer[SECTIONS[section]] for answer in answers] == [[]] * 4


@pytest.fixture(scope="module")
def more_answers(launch_once: SharedLaunch) -> list[dict[str, list[str]]]:
    """One launch for the longer cases."""
    return launched(launch_once, f"{RANKS}:sections", MORE_SECTIONS, HERE)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("section", MORE_SECTIONS)
def test_so_they_are_in_every_schedule_and_layout(
    section: str, more_answers: list[dict[str, list[str]]]
) -> None:
    assert [answer[MORE_SECTIONS[section]] for answer in more_answers] == [[]] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@given(losses=st.lists(st.tuples(*[st.floats(-1000, 1000, width=32)] * 3), min_size=2, max_size=5))
def test_losses_of_ranks_are_summed_in_single_precision(
    dtype: torch.dtype, losses: list[tuple[float, ...]]
) -> None:
    vectors = [torch.zeros(num_loss_elements(dtype, len(losses)), dtype=dtype) for _ in losses]
    for rank, own in enumerate(losses):
        for loss in own:
            LossSum(vectors[rank], rank).add(torch.tensor(loss))
    total = float(LossSum(torch.stack(vectors).sum(0), 0).total())
    assert total == pytest.approx(
        sum(map(sum, losses)), abs=1e-6 * sum(abs(x) for own in losses for x in own) + 1e-6
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_losses_that_are_not_finite_stay_so(value: float) -> None:
    elements = torch.zeros(num_loss_elements(torch.bfloat16, 2), dtype=torch.bfloat16)
    LossSum(elements, 1).add(torch.tensor(value))
    assert str(float(LossSum(elements, 0).total())) == str(value)


def test_losses_of_a_stage_that_trains_nothing_are_where_the_ranks_compute() -> None:
    gradients = StageGradients.of(torch.nn.Module(), ranks=2, index=0, number=1, device=torch.device("meta"))
    assert gradients.vector is not None and gradients.vector.is_meta


def test_a_number_that_the_last_stage_returns_is_told_for_each_micro_batch() -> None:
    last: Any = SimpleNamespace(places=SimpleNamespace(num_stages=1), _is_last=True)
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    assert Pipeline._outputs(last, {0: StageStep(outputs={1: two, 0: one})}).tolist() == [1, 2]
    pairs = StageStep(outputs={0: (torch.ones(2, 3), one), 1: (torch.ones(1, 3), two)})
    rows, numbers = Pipeline._outputs(last, {0: pairs})
    assert rows.shape == (3, 3) and numbers.tolist() == [1, 2]


@pytest.mark.gloo
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_of_one_stage_in_a_step_ends_the_waits_of_all(where: str) -> None:
    answers = launch(f"{RANKS}:fails", 3, {"where": where}, timeout_s=180, env=HERE)
    for rank, (said, took) in enumerate(answers):
        assert took < 20, "at the deadline"
        told = r"BindError: rank 1 failed in .* \(call \d+\): ValueError: no more of this"
        assert rank == 1 or re.match(told, said), said


@pytest.mark.gloo
def test_a_stage_that_is_killed_is_named_by_all() -> None:
    with pytest.raises(RankLostError, match=r"^rank 2 was killed by SIGKILL$") as caught:
        launch(f"{RANKS}:dies", 3, {}, timeout_s=180, env=HERE, stale_s=1.0)
    assert caught.value.missing == (2,)
    for rank in (0, 1):
        said = caught.value.reports[rank]
        assert said.startswith("rank 2 stopped answering while waiting for "), said


@pytest.mark.slow
def test_torch_refuses_skip_connections() -> None:
    """The same model, cut by torch's own tracer: why `u_shaped` above runs in our executor."""
    import pipeline_models as models
    from torch.distributed.pipelining import SplitPoint
    from torch.distributed.pipelining import pipeline as traced_pipeline

    import meshweave as mw
    from meshweave.algorithms.pipeline.examples import chain_of_ranks
    from meshweave_lab.bench import observing

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = torch.nn.ModuleList(models.u_model())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return models.run_whole(list(self.stages), models.U_SKIPS, x)

    batch, target = models.waves(6)
    schedule = mw.algorithm("1f1b").schedule(chain_of_ranks(range(4), 3), mw.schedules.PipelineConfig())
    with observing.fake_default_group(0, 4):
        cuts = {f"stages.{number}": SplitPoint.BEGINNING for number in (1, 2, 3)}
        pipe = traced_pipeline(Whole(), (batch[:2],), split_spec=cuts)
        stage = pipe.build_stage(0, torch.device("cpu"))
        runtime = mw.nn.torch_pipeline([stage], schedule, torch.nn.functional.mse_loss)
        with pytest.raises(RuntimeError, match=r"skip connections, which are unsupported"):
            runtime.step(batch, target=target)


def test_targets_of_a_stage_weigh_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many a micro-batch or a rank with rows of its own has; here another pair of ranks has two."""
    stage = ParallelStage.__new__(ParallelStage)
    torch.nn.Module.__init__(stage)
    stage._model = SimpleNamespace(agreement=SimpleNamespace(limits=TokenLimits(8, 8)))  # type: ignore[assignment]
    targets = torch.tensor([[1, 2, 3], [1, -100, -100], [-100, -100, -100], [1, 2, -100]])
    context, ranks = TorchContext(), (4, 5, 6, 7)
    stage.count_targets(targets, 4, 1, ranks, context)
    assert stage.num_items == 6 / 4
    stage.count_targets(targets, 0, 2, ranks, context)  # losses are summed, each by its own number
    assert stage.num_items is None
    monkeypatch.setattr(parallel_stage, "gathered", lambda own, *_: torch.tensor([[6], [6], [2], [2]]))
    stage.count_targets(targets, 4, 2, ranks, context)
    assert stage.num_items == (6 + 2) / 4
    pipeline: Any = SimpleNamespace(
        _stages={0: stage}, _running=threading.Lock(), _stepped=lambda *_, **__: 5
    )
    assert Pipeline._run(pipeline, None, None, trains=False, wants_outputs=True) == 5
    assert stage.num_items is None


@pytest.mark.parametrize("has_one", [True, False])
def test_a_target_of_some_ranks_is_refused(has_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of an evaluation would be a part of the whole; ranks 5 and 7 have none."""
    target, context = torch.ones(2) if has_one else None, TorchContext()
    others = torch.tensor([[1], [0], [1], [0]])
    monkeypatch.setattr(stage_words, "gathered", lambda own, *_: others)
    with pytest.raises(
        LayoutError, match=r"^ranks 5 and 7 of the last stage have no target, and others have"
    ):
        stage_words.require_target_of_all(target, (4, 5, 6, 7), context)
    monkeypatch.setattr(stage_words, "gathered", lambda own, *_: own.expand(4, 1))
    stage_words.require_target_of_all(target, (4, 5, 6, 7), context)


def test_a_batch_that_is_to_have_a_gradient_is_refused() -> None:
    batch = torch.ones(6, 2, requires_grad=True)
    assert kind_of_micro_batch(batch, 3, 2, trains=False) == TensorKind((4, 2), torch.float32)
    with pytest.raises(LayoutError, match=r"requires a gradient.* let the first stage compute it"):
        kind_of_micro_batch(batch, 3, 2, trains=True)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            lambda y, t: (y - t) ** 2,
            "the loss_fn returns a tensor (2, 3) of float32; it must",
        ),
        (lambda y, t: (y.mean(), t), "the loss_fn returns a tuple"),
        (lambda y, t: (y.detach() - t).mean(), "the loss has no gradient"),
        (lambda y, t: (y - t).mean()[None], ""),
    ],
)
@pytest.mark.parametrize("whole", [(), (0,)])
def test_a_loss_is_one_number_with_a_gradient(loss: Any, words: str, whole: tuple[int, ...]) -> None:
    module, kind, x = torch.nn.Linear(3, 3), TensorKind((2, 3), torch.float32), torch.ones(2, 3)
    functions, stash = (
        StageFunctions(module, StageShape(1, 2, (kind,), (), (0,)), loss, whole),
        dict[str, Any](),
    )
    functions.step = StageStep(targets=[x])

    def run() -> None:
        functions.forward(stash, x, x, 0)
        functions.input_grad(stash, x, 0)
        functions.weight_grad(stash, x, 0)

    if words:
        with pytest.raises(LayoutError, match=f"^{re.escape(words)}"):
            run()
    else:
        run()
        assert module.bias.grad.tolist() == pytest.approx([1 / 3] * 3)
        assert functions.step.losses[0].shape == ()


def test_an_error_in_a_backward_pass_is_that_of_the_stage() -> None:
    """torch raises another in its place, with the shapes of a stage's outputs."""
    module, kind, x = torch.nn.Linear(3, 3), TensorKind((2, 3), torch.float32), torch.ones(2, 3)
    functions, stash = StageFunctions(module, StageShape(1, 2, (kind,), (kind,), (0,), (2,)), None, ()), {}
    functions.forward(stash, x, x, 0)
    stash["outputs"][0].register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        functions.input_grad(stash, x, x, 0)


def test_only_hooks_of_others_need_whole_backward_passes() -> None:
    """That of a parallelised model is on the table of embedding and head, which the last stage may have."""
    module = torch.nn.Linear(2, 2)
    gradients = StageGradients.of(module, ranks=1, index=0, number=1, device=torch.device("cpu"))
    module.weight.register_post_accumulate_grad_hook(GradientProbe(torch.nn.Module())._keep)
    gradients.check(module, 1, splits=True)
    module.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(UnsupportedError, match="weight has a post-accumulate gradient hook"):
        gradients.check(module, 1, splits=True)


def test_a_hook_that_steps_between_micro_batches_is_refused() -> None:
    module = torch.nn.Linear(2, 2)
    gradients = StageGradients.of(module, ranks=1, index=0, number=1, device=torch.device("cpu"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    gradients.begin()
    module(torch.ones(1, 2)).sum().backward()
    gradients.check_kept(module, 1, micro_batches=1)
    with pytest.raises(LayoutError, match="stage 1: bias was changed during the step, after one of 4 micro"):
        gradients.check_kept(module, 1, micro_batches=4)


class TwoBiases(torch.nn.Module):
    """Adds the sum of two parameters, whose gradients torch has as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.one + self.two)


def test_each_parameter_of_a_backward_in_two_parts_has_a_gradient_of_its_own() -> None:
    module, kind, x = TwoBiases(), TensorKind((2, 3), torch.float32), torch.ones(2, 3)
    functions = StageFunctions(module, StageShape(1, 2, (kind,), (kind,), (0,), (2,)), None, ())
    for micro_batch in range(2):
        stash: dict[str, Any] = {}
        functions.forward(stash, x, x, micro_batch)
        functions.input_grad(stash, x, x, micro_batch)
        functions.weight_grad(stash, x, micro_batch)
    assert [each.grad.tolist() for each in module.parameters()] == [[4.0] * 3] * 2  # type: ignore[union-attr]
