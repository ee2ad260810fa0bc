"""Parts of parallelised models that need no ranks: kinds of norms, buckets, losses, shares of memory, words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
from plain_models import PlainLlama  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from meshweave.base.errors import UnsupportedError  # noqa: E402
from meshweave.nn.parallel import trial_memory  # noqa: E402
from meshweave.nn.parallel.features import ForwardArguments  # noqa: E402
from meshweave.nn.parallel.known import PLAIN  # noqa: E402
from meshweave.nn.parallel.loss import VocabularyLoss  # noqa: E402
from meshweave.nn.parallel.model_words import configuration_words  # noqa: E402
from meshweave.nn.parallel.norm import ParallelNorm, _kind  # noqa: E402
from meshweave.nn.parallel.uses import ParameterUse  # noqa: E402
from meshweave.nn.prove.reduced import kinds_of  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_norm_without_an_epsilon_has_that_of_the_type_in_which_torch_computes(dtype: Any) -> None:
    norm = nn.RMSNorm(16, dtype=dtype)
    x = (1e-3 * torch.randn(2, 16, generator=torch.Generator().manual_seed(0))).to(dtype)
    wide = x if dtype == torch.float64 else x.float()
    assert torch.equal(F.rms_norm(wide, (16,), eps=_kind(norm, "norm").eps).to(dtype), norm(x))


def test_a_rank_without_features_adds_nothing_to_the_sums_of_a_layer_norm() -> None:
    """As the last of four ranks that share six."""
    norm: Any = ParallelNorm.__new__(ParallelNorm)
    nn.Module.__init__(norm)
    norm.is_layer_norm, norm.features, norm.eps, own = True, 6, 1e-5, list[Tensor]()
    norm.sum_rows = lambda each, *_: own.append(each) or each
    norm._normalised(torch.zeros(1, 2, 0, requires_grad=True), None, None, 1, 2)
    assert own[0].shape == (1, 2, 2) and not own[0].any() and own[0].requires_grad


def test_buckets_end_between_layers_also_of_parameters_that_no_layer_begins_with() -> None:
    """As of weights whose gradients are summed along other axes than those of the norm before them."""

    def layer() -> Any:
        kept = {
            name: SimpleNamespace(
                gathered=(), summed=summed, max_kept_elements=4, compiled_move=None,
                strategy=SimpleNamespace(device_mesh=None),
            )
            for name, summed in (("norm", (0, 1)), ("weight", (0,)), ("bias", (0,)))
        }  # fmt: skip
        return SimpleNamespace(kept=kept, opened={})

    layers = [layer() for _ in range(3)]
    use = ParameterUse([[(each, name) for name in each.kept] for each in layers], most_bytes=32)
    divided = use._divided([(torch.float32, True)] * 9)
    assert [places for places, _ in divided] == [[0, 3], [6], [1, 2], [4, 5], [7, 8]]


def test_words_that_are_left_out_have_no_part_in_a_loss_that_ranks_share() -> None:
    whole = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    whole[..., 4:] = -torch.inf
    targets, terms = torch.tensor([[0, 3, 1]]), list[Tensor]()
    for first in (0, 4):  # what each of two ranks adds
        loss: Any = object.__new__(VocabularyLoss)
        loss.first, loss.end = first, first + 4
        loss.greatest, loss.sums = lambda x, *_: whole.amax(-1), lambda each, *_: terms.append(each) or each
        loss._shared(whole[..., first : first + 4], targets, (1, 3))
    total = sum(terms)
    made = (total[..., 0].log() - total[..., 1]).mean()
    torch.testing.assert_close(made, F.cross_entropy(whole.flatten(0, 1), targets.flatten()))


def test_memory_of_a_host_is_shared_by_its_own_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not by those of all hosts."""
    told = tmp_path / "meminfo"
    told.write_text("MemTotal: 4096 kB\nMemAvailable: 1000 kB\n")
    monkeypatch.setattr(trial_memory, "_MEMORY", told)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert trial_memory.available_bytes() == 512_000


@pytest.mark.parametrize(
    ("name", "value", "labels"),
    [
        ("position_ids", torch.arange(5), None),
        ("position_ids", torch.tensor(0), None),
        ("attention_mask", torch.tensor([[1, 1, 0]]), torch.zeros(1, 2, dtype=torch.int64)),
    ],
    ids=["positions of fewer", "one position", "labels of fewer"],
)
def test_arguments_of_another_shape_are_refused_in_a_sentence(
    name: str, value: Tensor, labels: Tensor
) -> None:
    arguments = ForwardArguments(PlainLlama(), has_shift=True)
    with pytest.raises(UnsupportedError, match=f"^{name} is not computed: "):
        arguments.inputs(torch.zeros(1, 3, dtype=torch.int64), (), {name: value, "labels": labels}, None)


def test_layers_with_equal_sets_are_of_one_kind() -> None:
    """In whichever order a process has them: 0 and 8 have one place in small sets, whichever comes first."""
    model: Any = PlainLlama(2)
    for layer, members in zip(model.model.layers, ([0, 8], [8, 0]), strict=True):
        layer.chosen = set(members)
    assert kinds_of(model, PLAIN["Llama"]) == [0, 0]
    told = [
        SimpleNamespace(config=SimpleNamespace(kept={"chosen": layer.chosen})) for layer in model.model.layers
    ]
    assert configuration_words(told[0]) == configuration_words(told[1])
