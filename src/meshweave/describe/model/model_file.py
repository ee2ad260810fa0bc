"""Models from files: the TOML form, a catalog entry, or a Hugging Face `config.json`.

`docs/reference/descriptions.md` is generated from `ModelFile`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import Field

from meshweave.describe.catalog import catalog_text, model_names
from meshweave.describe.files import (
    Count,
    FileModel,
    Name,
    fail_with_all,
    is_path,
    load_table,
    parse_table,
    validate_table,
)
from meshweave.describe.model.hugging_face import head_problems, transformer_from_config
from meshweave.describe.model.transformer import Transformer


class ModelFile(FileModel):
    """The sizes of a dense decoder-only transformer."""

    name: Name = Field(description="the model's name, a string of printable characters")
    source: str = Field(description="where the sizes are from, a string", min_length=1)
    note: str = Field("", description="what to know before use, a string")
    num_layers: Count = Field(description="the number of blocks, a whole number of at least 1")
    hidden: Count = Field(description="the hidden size, a whole number of at least 1")
    num_heads: Count = Field(description="the number of attention heads, a whole number of at least 1")
    num_kv_heads: Count | None = Field(
        None, description="the number of key and value heads (left out: num_heads), at least 1"
    )
    head_dim: Count | None = Field(
        None, description="the size of one head (left out: hidden / num_heads), at least 1"
    )
    ffn_hidden: Count = Field(description="the inner size of the FFN, a whole number of at least 1")
    vocab_size: Count | None = Field(None, description="the number of tokens (left out: unknown), at least 1")
    gated_ffn: bool = Field(description="true for a gated FFN (SwiGLU and kin), else false")
    tied_embeddings: bool = Field(True, description="true where input and output share one embedding")


def _transformer_from(data: dict[str, Any], file: str | Path) -> Transformer:
    """Return the model that a TOML table describes. Raises DescriptionError with every problem."""
    table, problems = validate_table(ModelFile, data)
    if table is not None:
        problems += head_problems(
            table.hidden, table.num_heads, table.num_kv_heads, table.head_dim, "num_kv_heads"
        )
    if table is None or problems:
        fail_with_all(file, problems)
    return Transformer(
        table.name,
        table.num_layers,
        table.hidden,
        table.num_heads,
        table.num_kv_heads or table.num_heads,
        table.head_dim or table.hidden // table.num_heads,
        table.ffn_hidden,
        table.vocab_size,
        table.gated_ffn,
        table.source,
        table.tied_embeddings,
    )


def load_model(name_or_path: str | Path) -> Transformer:
    """Return the model of a catalog name, a TOML file, or a Hugging Face `config.json` (or its directory).

    Raises:
        DescriptionError: there is no such entry or file, or the description is wrong; the error lists every
            problem of a file.
        UnsupportedError: the model is not a dense decoder-only transformer.
    """
    file_name = str(name_or_path)
    if not isinstance(name_or_path, Path) and (file_name in model_names() or not is_path(file_name)):
        file = f"{file_name}.toml"
        return _transformer_from(parse_table(catalog_text("models", file_name), file, "toml"), file)
    if os.path.isdir(file_name):  # noqa: PTH112  (unlike Path.is_dir, never raises)
        file_name = str(Path(file_name) / "config.json")
    data = load_table(file_name)
    if file_name.lower().endswith(".json"):
        return transformer_from_config(data, file_name)
    return _transformer_from(data, file_name)
