"""What ranks do in tests of masks, positions, generation and files of models that run by their own code."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import small_models
import torch
import torch.distributed as dist
from hosted_rank_functions import worst
from plain_models import PlainLlama
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate

from meshweave.base.errors import MeshweaveError
from meshweave.execute.ranks.job import RankContext
from meshweave.nn.parallel.checksums import checksum
from meshweave.nn.parallel.parallelize import parallelize
from meshweave.nn.weights.load import load_weights

IGNORED = -100


def tried(context: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each of the payload's functions gives, by its name, the type of model and the strategy."""
    torch.set_num_threads(1)
    folder = Path(payload["folder"])
    said = {}
    with small_models.quiet():
        for name, kind, strategy in payload["cases"]:
            try:
                with small_models.KeepDoubles():
                    said[f"{name} {kind} {strategy}"] = globals()[name](kind, strategy, folder)
            except MeshweaveError as error:
                said[f"{name} {kind} {strategy}"] = f"{type(error).__name__}: {error}"
    return said


def mesh_of(strategy: str) -> DeviceMesh:
    """Return a mesh of all ranks for a strategy."""
    count = dist.get_world_size()
    if strategy == "atp":
        return init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("row", "col"))
    return init_device_mesh("cpu", (count,), mesh_dim_names=("tp",))


def drawn(form: str, seed: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return tokens, targets and what a call is given beside them, of rows (4, 16).

    Of rows that are "packed" transformers makes documents where it makes no cache alone.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = small_models.batch(seed)
    rows, length = tokens.shape
    at = torch.arange(length)[None]
    lengths = torch.randint(2, length + 1, (rows, 1), generator=generator)
    if form in ("packed", "documents"):
        begins = torch.rand((rows, length), generator=generator) < 0.25
        begins[:, 0] = True
        first = torch.where(begins, at.expand(rows, -1), 0).cummax(1).values
        beside = {"position_ids": at - first}
        return tokens, targets, beside if form == "packed" else {**beside, "use_cache": False}
    masks = {
        "left": at >= length - lengths,
        "right": at < lengths,
        "holes": torch.rand((rows, length), generator=generator) < 0.7,
    }
    mask = masks[form]
    mask[:, -1 if form != "right" else 0] = True
    return tokens, targets.masked_fill(~mask, IGNORED), {"attention_mask": mask.long()}


def given(kind: str, strategy: str, folder: Path) -> dict[str, tuple[float, float, float]]:
    """Return how far loss, logits and gradients are from those of one process, by what a call is given."""
    whole = small_models.make_model(kind)
    whole(drawn("left", 0)[0], output_hidden_states=True)  # for which transformers puts hooks in
    made = parallelize(copy.deepcopy(whole), strategy, mesh_of(strategy), check=False)
    answers = {}
    for number, form in enumerate(("left", "right", "holes", "packed", "documents")):
        tokens, targets, beside = drawn(form, 100 * number + sum(map(ord, kind)))
        try:
            answers[form] = _off(made.module, whole, tokens, targets, beside)
        except MeshweaveError as error:
            answers[form] = f"{type(error).__name__}: {error}"
    return answers


def _off(module: Any, whole: Any, tokens: Tensor, targets: Tensor, beside: Mapping[str, Any]) -> Any:
    """Return how far loss, logits and gradients of a parallelised model are from its original's."""
    module.zero_grad()
    whole.zero_grad()
    loss = module(tokens, targets=targets, **beside).loss
    loss.backward()
    out = whole(input_ids=tokens, **beside)
    wanted = out.logits if hasattr(out, "logits") else out[0]
    right = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    right.backward()
    with torch.no_grad():
        logits = module(tokens, **beside).logits
    seen = (targets != IGNORED)[..., None]
    off = float(((logits - wanted) * seen).abs().max() / wanted.abs().max())
    return float((loss - right).abs().detach()), off, worst(module, whole)


def generated(kind: str, strategy: str, folder: Path) -> dict[str, Any]:
    """Return whether tokens and logits are those of one process, by how they are generated, and checksums."""
    whole = small_models.make_model(kind).eval()
    made = parallelize(copy.deepcopy(whole), strategy, mesh_of(strategy), check=False)
    prompts = torch.randint(1, small_models.WORDS, (4, 5), generator=torch.Generator().manual_seed(7))
    mask = torch.arange(5)[None] >= torch.tensor([0, 2, 3, 1])[:, None]
    shared = {
        "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0, "output_logits": True,
        "return_dict_in_generate": True,
    }  # fmt: skip
    forms: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "padded": {"do_sample": False, "attention_mask": mask.long()},
        "without a cache": {"do_sample": False, "use_cache": False},
        "sampled": {"do_sample": True, "top_k": 20, "temperature": 1.3, "attention_mask": mask.long()},
        "beams": {"do_sample": False, "num_beams": 3},
    }
    answers: dict[str, Any] = {}
    for form, options in forms.items():
        outs = []
        for model in (made.module, whole):
            torch.manual_seed(11)
            try:
                outs.append(model.generate(prompts, **shared, **options))
            except MeshweaveError as error:
                answers[form] = f"{type(error).__name__}: {error}"
                break
        if len(outs) == 2:
            own, right = outs
            logits = torch.stack(own.logits)
            off = (logits - torch.stack(right.logits)).abs().max() / logits.abs().max()
            answers[form] = [torch.equal(own.sequences, right.sequences), float(off), _sum(logits)]
    return answers


def _sum(tensor: Tensor) -> str:
    return f"{int(checksum(tensor)):x}"


def differing(kind: str, strategy: str, folder: Path) -> dict[str, str]:
    """Return what is said where the last rank gives something else, or where a call is given what does not fit."""
    made = parallelize(small_models.make_model(kind), strategy, mesh_of(strategy), check=False)
    module: Any = made.module
    tokens, targets = small_models.batch()
    is_last = int(dist.get_rank() == dist.get_world_size() - 1)
    mask, positions = torch.ones_like(tokens), torch.arange(16).expand(4, -1).clone()
    other_mask, other_positions = mask.clone(), positions.clone()
    other_mask[1, 2] -= is_last
    other_positions[2, 5] += is_last
    alone = {"attention_mask": mask} if is_last else {}
    wide = mask[:, None, None]
    plain, state = small_models.make_model(kind).state_dict(), module.state_dict()
    lying = {name: each.redistribute(placements=[Replicate()]) for name, each in state.items()}
    calls = {
        "mask": lambda: module(tokens, attention_mask=other_mask, targets=targets),
        "positions": lambda: module(tokens, position_ids=other_positions, targets=targets),
        "mask of one": lambda: module(tokens, targets=targets, **alone),
        "short mask": lambda: module(tokens, attention_mask=mask[:, 1:]),
        "mask of more dims": lambda: module(tokens, attention_mask=wide),
        "rows of a mask": lambda: module(tokens, attention_mask=mask[1:]),
        "long positions": lambda: module(tokens, position_ids=torch.arange(17)[None]),
        "cache with gradients": lambda: module(tokens, use_cache=True),
        "logits of a loss": lambda: module(tokens, targets=targets, logits_to_keep=2),
        "generator": lambda: _seeded(3 + is_last, module, tokens, do_sample=True, max_new_tokens=2),
        "options": lambda: module.generate(tokens, max_new_tokens=2 + is_last),
        "prompts": lambda: module.generate((tokens + is_last) % 48, max_new_tokens=2),
        "time": lambda: module.generate(tokens, max_time=1.0),
        "early exit": lambda: module.generate(tokens[:1], assistant_early_exit=1, max_new_tokens=2),
        "time by place": lambda: module.generate(tokens, type(module.generation_config)(max_time=1.0)),
        "beams": lambda: module.generate(tokens, num_beams=2, max_new_tokens=2),
        "static": lambda: module.generate(tokens, cache_implementation="static", max_new_tokens=2),
        "one row": lambda: module(tokens[0], targets=targets[0]),
        "whole weights": lambda: module.load_state_dict(plain),
        "whole weights in place": lambda: module.load_state_dict(plain, assign=True),
        "other layout in place": lambda: module.load_state_dict(lying, assign=True),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing"
        except MeshweaveError as error:
            said[name] = str(error)
    return said


def saved(kind: str, strategy: str, folder: Path) -> dict[str, Any]:
    """Return what is wrong with files that ranks write: beside the model's own, read by transformers, by ranks."""
    whole, own = small_models.make_model(kind), folder / f"{kind} {strategy}"
    made = parallelize(copy.deepcopy(whole), strategy, mesh_of(strategy), check=False)
    made.module.save_pretrained(own / "ours", max_shard_size="30KB", safe_serialization=True)
    other = "megatron" if strategy == "zero3" else "zero3"
    again = parallelize(small_models.make_model(kind, seed=5), other, mesh_of(other), check=False)
    load_weights(again.module, own / "ours")
    again.module.save_pretrained(own / "again", max_shard_size="50KB")
    wrong: dict[str, Any] = {}
    if dist.get_rank() == 0:
        whole.save_pretrained(own / "theirs")
        read = type(whole).from_pretrained(own / "ours")
        pairs = [(whole.state_dict()[name], value) for name, value in read.state_dict().items()]
        wrong["read by transformers"] = sum(not torch.equal(one, two) for one, two in pairs)
        ours, theirs, later = ([*_stored(own / part)] for part in ("ours", "theirs", "again"))
        wrong["names"] = sorted({*ours} ^ {*theirs})
        wrong["names again"] = sorted({*later} ^ {*theirs})
        stored = _stored(own / "ours")
        wrong["bits again"] = [
            name for name, value in _stored(own / "again").items() if not torch.equal(value, stored[name])
        ]
        configs = [json.loads((own / part / "config.json").read_text()) for part in ("ours", "theirs")]
        wrong["config"] = [name for name, value in configs[1].items() if configs[0].get(name) != value]
        wrong["files"] = len([*(own / "ours").glob("*.safetensors")]) < 3
    return wrong


def _stored(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def _seeded(seed: int, module: Any, tokens: Tensor, **options: Any) -> None:
    torch.manual_seed(seed)
    module.generate(tokens, **options)


def adapted(kind: str, strategy: str, folder: Path) -> dict[str, Any]:
    """Return how far losses and adapters of a model are from one process' after steps, and its merged logits.

    In the second and the third step its layers are computed again, by each kind of torch's checkpoints.
    """
    import peft

    plain = small_models.make_model(kind)
    linear = {
        name.rpartition(".")[2] for name, each in plain.named_modules() if isinstance(each, torch.nn.Linear)
    }
    targets = sorted(linear - {"lm_head", "embed_out", "output"})
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, lora_dropout=0.0)
    whole = peft.get_peft_model(plain, config).double()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    own = copy.deepcopy(whole)
    made = parallelize(own.get_base_model(), strategy, mesh_of(strategy), check=kind == "granite")
    tokens, wanted = small_models.batch()
    trained = [[p for p in model.parameters() if p.requires_grad] for model in (own, whole)]
    optimizers = [torch.optim.SGD(each, lr=0.3) for each in trained]
    losses = []
    for reentrant in (None, False, True):
        if reentrant is not None and made.module.supports_gradient_checkpointing:
            assert made.module.training
            made.module.gradient_checkpointing_enable({"use_reentrant": reentrant})
            made.module.enable_input_require_grads()
        loss = made.loss(tokens, wanted)
        right = small_models.loss_of(whole, tokens, wanted)
        for optimizer, one in zip(optimizers, (loss, right), strict=True):
            optimizer.zero_grad()
            one.backward()
            optimizer.step()
        losses.append([float(loss.detach()), float(right.detach())])
    state = {name: value for name, value in made.module.state_dict().items() if "lora_" in name}
    right_state = {name: v for name, v in whole.get_base_model().state_dict().items() if "lora_" in name}
    off = [float((state[name].full_tensor() - value).abs().max()) for name, value in right_state.items()]
    said = ""
    try:
        made.module.save_pretrained(folder / "adapted")
    except MeshweaveError as error:
        said = str(error)
    merged = own.merge_and_unload()
    whole_merged = whole.merge_and_unload()
    with torch.no_grad():
        logits = merged(tokens).logits
        change = logits - whole_merged(tokens, use_cache=False).logits
    names = sorted(merged.state_dict()) == sorted(whole_merged.state_dict())
    return {
        "losses": losses, "names": sorted(state) == sorted(right_state) and names, "adapters": max(off),
        "said": said, "count": len(off), "merged": float(change.abs().max() / logits.abs().max()),
    }  # fmt: skip


def fused(kind: str, strategy: str, folder: Path) -> dict[str, Any]:
    """Return how far a model is from one process after steps of fused optimizers, and what else it keeps to."""
    tokens, targets = small_models.batch()
    whole = small_models.make_model(kind).float()
    found: dict[str, Any] = {}
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):
        own = copy.deepcopy(whole)
        parallelize(own, strategy, mesh_of(strategy), check=False)
        for module in (own, right := copy.deepcopy(whole)):
            stepped_by = optimizer(module.parameters(), lr=1e-2, fused=True)
            small_models.loss_of(module, tokens, targets).backward()
            stepped_by.step()
        pairs = zip(own.parameters(), right.parameters(), strict=True)
        found[optimizer.__name__] = max(
            float((mine.full_tensor() - of_one).abs().max())  # type: ignore[attr-defined]
            for mine, of_one in pairs
        )
    kinds = [
        sum(isinstance(each, torch.nn.LayerNorm) for each in module.modules()) for module in (own, whole)
    ]
    found["norms"] = kinds
    return found


def kept(kind: str, strategy: str, folder: Path) -> dict[str, Any]:
    """Return how far what PEFT saves and loads of adapters is from one process, and what is said of the rest."""
    import peft
    import torch.distributed as dist

    def tuned(value: float) -> Any:
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
        model = peft.get_peft_model(small_models.make_model(kind), config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.linspace(-value, value, parameter.numel()).view(parameter.shape))
        return model

    own, whole = tuned(0.3), tuned(0.3)
    made = parallelize(own.get_base_model(), strategy, mesh_of(strategy), check=False)
    state, right = map(peft.get_peft_model_state_dict, (own, whole))
    is_first = dist.get_rank() == 0
    own.save_pretrained(folder / "adapters", is_main_process=is_first)
    if is_first:
        tuned(0.7).save_pretrained(folder / "others")
    dist.barrier()
    read = [peft.PeftModel.from_pretrained(small_models.make_model(kind), folder / "adapters"), whole]
    saved = [small_models.loss_of(each, *small_models.batch()) for each in read]
    for model in (own, whole):
        model.load_adapter(folder / "others", "default")
    loaded = [made.loss(*small_models.batch()), small_models.loss_of(whole, *small_models.batch())]
    said = {}
    for name, call in {"disabled": own.disable_adapter().__enter__, "merged": own.merge_adapter}.items():
        try:
            call()
        except MeshweaveError as error:
            said[name] = str(error)
    return {
        "names": sorted(state) == sorted(right) and len(right) > 4,
        "state": max(float((state[name] - value).abs().max()) for name, value in right.items()),
        "saved": abs(float(saved[0] - saved[1])), "loaded": abs(float(loaded[0] - loaded[1])),
        "differ": abs(float(loaded[1] - saved[1])), "said": said,
    }  # fmt: skip


def stepped(kind: str, strategy: str, folder: Path) -> list[int]:
    """Return how many steps of an optimizer are counted after one, of models that come and go."""
    counts = []
    for _ in range(2):
        gc.collect()
        made = parallelize(small_models.make_model(kind), strategy, mesh_of(strategy), check=False)
        optimizer = torch.optim.SGD(made.module.parameters(), lr=0.1)
        made.loss(*small_models.batch()).backward()
        optimizer.step()
        counts.append(made.agreement.progress.steps)
        del made, optimizer
    return counts


def refused(kind: str, strategy: str, folder: Path) -> dict[str, str]:
    """Return what is said of adapters that are not computed, and whether the model is left as it was."""
    import peft

    def config(**options: Any) -> Any:
        return peft.LoraConfig(r=2, **{"target_modules": ["q_proj"], **options})

    models = {
        name: peft.get_peft_model(small_models.make_model(kind), config(**options))
        for name, options in {
            "dropout": {"lora_dropout": 0.1},
            "variant": {"use_dora": True},
            "two": {},
            "embedding": {"target_modules": ["embed_tokens"]},
            "head": {"target_modules": ["q_proj", "lm_head"]},
            "whole": {},
        }.items()
    }
    models["two"].add_adapter("second", config())
    models["layers of this library"] = peft.get_peft_model(PlainLlama(), config())
    said = {}
    for name, model in models.items():
        before = {path: id(child) for path, child in model.named_modules()}
        try:
            parallelize(model if name == "whole" else model.get_base_model(), strategy, mesh_of(strategy))
            said[name] = "nothing"
        except MeshweaveError as error:
            is_same = before == {path: id(child) for path, child in model.named_modules()}
            said[name] = f"{error}" if is_same else "the model was changed"
    return said
