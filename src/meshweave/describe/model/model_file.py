"""Models from files: the TOML form, a catalog entry, or a Hugging Face `config.json`.

`docs/reference/descriptions.md` is generated from `ModelFile`.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from meshweave.base.errors import DescriptionError, printable
from meshweave.describe.catalog import catalog_text, models
from meshweave.describe.files import (
    FileModel,
    Name,
    fail_with_all,
    file_model,
    is_path,
    load_table,
    parse_table,
    validate_table,
)
from meshweave.describe.model.architecture import (
    Architecture,
    JsonTable,
    ModelSize,
    NotPriced,
    Words,
    positions_not_priced,
)
from meshweave.describe.model.hugging_face import head_problems, transformer_from_config
from meshweave.describe.model.layer_file import LayersFile, layers_from, layers_table
from meshweave.describe.model.transformer import Transformer


class ArchitectureFile(file_model(Architecture)):  # type: ignore[misc]
    """What defines a model beside its sizes, for other software; what is left out is not said."""

    others: list[Words] = Field([], description="what else defines the model, a list of strings")

    def architecture(self) -> Architecture:
        """Return the architecture that this table describes."""
        return Architecture(**{**self.model_dump(), "others": tuple(self.others)})


class NotPricedFile(file_model(NotPriced)):  # type: ignore[misc]
    """A property of a model that predictions of time and memory leave out."""


class ModelFile(FileModel):
    """The sizes of a dense decoder-only transformer."""

    name: Name = Field(description="the model's name, a string of printable characters")
    source: str = Field(description="where the sizes are from, a string", min_length=1)
    note: str = Field("", description="what to know before use, a string")
    num_layers: ModelSize = Field(description="the number of blocks, a whole number of at least 1")
    hidden: ModelSize = Field(description="the hidden size, a whole number of at least 1")
    num_heads: ModelSize = Field(description="the number of attention heads, a whole number of at least 1")
    num_kv_heads: ModelSize | None = Field(
        None, description="the number of key and value heads (left out: num_heads), at least 1"
    )
    head_dim: ModelSize | None = Field(
        None, description="the size of one head (left out: hidden / num_heads), at least 1"
    )
    ffn_hidden: ModelSize = Field(description="the inner size of the FFN, a whole number of at least 1")
    vocab_size: ModelSize | None = Field(
        None, description="the number of tokens (left out: unknown), at least 1"
    )
    gated_ffn: bool = Field(description="true for a gated FFN (SwiGLU and kin), else false")
    tied_embeddings: bool = Field(True, description="true where input and output share one embedding")
    architecture: ArchitectureFile = Field(
        default_factory=lambda: ArchitectureFile.model_validate({}),
        description="a table of what else defines the model",
    )
    not_priced: list[NotPricedFile] = Field(
        default_factory=list, description="a list of tables of what its price does not know"
    )
    runs: list[LayersFile] = Field(
        default_factory=list,
        description="a list of tables of its layers, node by node, where the other keys do not say them",
    )


class ConfigModelFile(FileModel):
    """A model whose layers are those of a config, for which the sizes of `ModelFile` do not suffice."""

    name: Name = Field(description="the model's name, a string of printable characters")
    source: str = Field(description="where the config is from, a string", min_length=1)
    note: str = Field("", description="what to know before use, a string")
    config: JsonTable = Field(
        description="the model's config.json, a table of JSON in a string", min_length=2
    )


def transformer_from(data: dict[str, Any], file: str | Path) -> Transformer:
    """Return the model that a TOML table describes; `file` is what errors name.

    Raises:
        DescriptionError: the description is wrong; the error lists the problems.
        UnsupportedError: the table has a `config` of another model than a decoder-only transformer.
    """
    if "config" in data:
        return _from_config(data, file)
    table, problems = validate_table(ModelFile, data)
    if table is not None:
        problems += head_problems(
            table.hidden, table.num_heads, table.num_kv_heads, table.head_dim, "num_kv_heads"
        )
    if table is None or problems:
        fail_with_all(file, problems)
    try:
        changed: dict[str, Any] = {
            "num_kv_heads": table.num_kv_heads or table.num_heads,
            "head_dim": table.head_dim or table.hidden // table.num_heads,
            "architecture": table.architecture.architecture(),
            "not_priced": _all_not_priced(table),
        }
        left_out = {*changed, "note", "runs"}
        return Transformer(**table.model_dump(exclude=left_out), **changed, layers=layers_from(table.runs))
    except DescriptionError as error:
        raise DescriptionError(f"{printable(file)}: {error}") from None


def _from_config(data: dict[str, Any], file: str | Path) -> Transformer:
    """Return the model of a table that has a config, as JSON, for its sizes."""
    table, problems = validate_table(ConfigModelFile, data)
    if table is None:
        fail_with_all(file, problems)
    config = json.loads(table.config)
    model = transformer_from_config(config, file)
    return replace(model, name=table.name, source=table.source)


def _all_not_priced(table: ModelFile) -> tuple[NotPriced, ...]:
    """Return what a table says is not priced, and what follows from its positions."""
    items = [NotPriced(**item.model_dump()) for item in table.not_priced]
    positions = table.architecture.max_positions
    if positions is not None and not any(item.beyond == positions for item in items):
        items.append(positions_not_priced(positions, learned=table.architecture.positions == "learned"))
    return tuple(items)


def model_table(model: Transformer) -> dict[str, Any]:
    """Return the table of a model file from which `transformer_from` reads an equal model.

    Of a model that was changed after it was read from its config it has the layers, and not that config.
    """
    by_config = {"name": model.name, "source": model.source, "config": model.config}
    if model.config and transformer_from(by_config, "config") == model:
        return by_config
    sizes = {
        each.name: value
        for each in fields(model)
        if each.name not in ("architecture", "not_priced", "layers", "config")
        and (value := getattr(model, each.name)) is not None
    }
    architecture = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in vars(model.architecture).items()
        if value not in (None, "", ())
    }
    return {
        **sizes,
        **({"architecture": architecture} if architecture else {}),
        **({"not_priced": [vars(item) for item in model.not_priced]} if model.not_priced else {}),
        **({"runs": layers_table(model.layers)} if model.layers else {}),
    }


class ToDict(Protocol):
    """A config of transformers."""

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of its `config.json`."""


class HasConfig(Protocol):
    """A model of transformers."""

    @property
    def config(self) -> Any:
        """Return its config, an object with `to_dict`."""


ModelSource = str | Path | ToDict | HasConfig


def load_model(source: ModelSource) -> Transformer:
    """Return the model of a catalog name, a TOML file, a Hugging Face `config.json`, or a model of transformers.

    Args:
        source: a name; a file, or the directory of a `config.json`; an id such as `Qwen/Qwen3-8B`, whose config
            Hugging Face's cache on this machine has; or a model of transformers or its config.

    Raises:
        DescriptionError: there is no such entry or file, or the description is wrong; the error lists the problems
            of a file.
        UnsupportedError: the model is not a decoder-only transformer of a supported kind.
    """
    if not isinstance(source, str | Path):
        return _of_config(source)
    file_name = str(source)
    if not isinstance(source, Path) and (file_name in models() or not is_path(file_name)):
        file = f"{file_name}.toml"
        return transformer_from(parse_table(catalog_text("models", file_name), file, "toml"), file)
    if os.path.isdir(file_name):  # noqa: PTH112  (unlike Path.is_dir, never raises)
        file_name = str(Path(file_name) / "config.json")
    elif isinstance(source, str) and _HUB_ID.fullmatch(file_name) and not os.path.exists(file_name):  # noqa: PTH110
        file_name = _cached_config(file_name)
    data = load_table(file_name)
    if file_name.lower().endswith(".json"):
        return transformer_from_config(data, file_name)
    return transformer_from(data, file_name)


_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}(?<!\.json)(?<!\.toml)")


def _of_config(source: ToDict | HasConfig) -> Transformer:
    """Return the model of a model or config of transformers. Raises DescriptionError where it is none."""
    to_dict = getattr(getattr(source, "config", source), "to_dict", None)
    if not callable(to_dict):
        raise DescriptionError(
            f"a {type(source).__name__} is no description of a model; give a name of the catalog, a file, or a "
            "model of transformers"
        )
    return transformer_from_config(to_dict(), type(source).__name__)


def _cached_config(hub_id: str) -> str:
    """Return the file of a config in Hugging Face's cache on this machine. Raises DescriptionError."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        cached: object = None
    else:
        try:
            cached = try_to_load_from_cache(hub_id, "config.json")
        except HFValidationError:
            cached = None
    if isinstance(cached, str):
        return cached
    raise DescriptionError(
        f"{printable(hub_id)}: no such file, and Hugging Face's cache on this machine has no config.json of that "
        f"id; `hf download {printable(hub_id)} config.json` fetches it"
    )
