"""Transformers from a Hugging Face `config.json`, whose families name the same sizes differently.

The names are those of the `configuration_*.py` of each family in Hugging Face's transformers. What the other keys
mean is in `config_features`; `Transformer.not_priced` lists those that no prediction knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshweave.base.errors import UnsupportedError, printable
from meshweave.describe.files import Problem, fail_with_all, format_value
from meshweave.describe.model.config_architecture import read_architecture
from meshweave.describe.model.config_features import (
    ACTIVATION,
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    not_priced,
    refusal,
    wrong_types,
)
from meshweave.describe.model.model_types import (
    KnownModelType,
    known_model_type,
    model_type_of,
    not_causal_reason,
)
from meshweave.describe.model.routed_config import is_routed, routed_transformer
from meshweave.describe.model.transformer import Transformer
from meshweave.describe.model.window_rules import with_layer_kinds
from meshweave.describe.model.workload import MAX_SIZE

_GATED_ACTIVATIONS = ("silu", "swish", "swiglu", "geglu", "reglu")


def transformer_from_config(data: dict[str, Any], file: str | Path) -> Transformer:
    """Return the model of a Hugging Face config; `file` is what errors name, and what the model's name is from.

    Raises:
        DescriptionError: sizes are missing or wrong; the error lists them.
        UnsupportedError: the model is not a decoder-only transformer of a supported kind.
    """
    own = model_type_of(data)
    if is_routed(data):
        return routed_transformer(data, model_name(file), printable(file))
    known = known_model_type(own)
    data = {**(known.defaults if known else {}), **data}
    reason = refusal(data, is_known=known is not None) or not_causal_reason(own)
    if reason is not None:
        raise UnsupportedError(f"{printable(file)}: {reason}")
    config = _ConfigReader(data, known)
    layers = config.required(LAYERS, "the number of blocks")
    hidden = config.required(HIDDEN, "the hidden size")
    heads = config.required(HEADS, "the number of heads")
    kv_heads, head_dim = config.kv_heads(), config.optional("head_dim")
    ffn, vocab_size = (
        config.ffn_hidden(hidden),
        config.required(("vocab_size",), "the size of the vocabulary"),
    )
    config.problems += wrong_types(data)
    if not config.problems:
        config.problems += head_problems(hidden, heads, kv_heads, head_dim, "num_key_value_heads")
    if config.problems:
        fail_with_all(file, config.problems)
    data = with_layer_kinds(data, layers, printable(file))
    tied = data.get("tie_word_embeddings")
    architecture = read_architecture(data, known, head_dim or hidden // heads)
    learned = architecture.positions == "learned"
    return Transformer(
        model_name(file),
        layers,
        hidden,
        heads,
        kv_heads or heads,
        head_dim or hidden // heads,
        ffn,
        vocab_size,
        config.has_gated_ffn,
        printable(file),
        tied is True,
        architecture,
        tuple(not_priced(data, hidden, is_known=known is not None, learned=learned)),
    )


def model_name(file: str | Path) -> str:
    """Return the name of a model from its file.

    A `config.json` has the name of its folder, in Hugging Face's cache that of the repository without its owner;
    any other file has its own, without the ending.
    """
    path = Path(file).absolute()
    if path.name.lower() != "config.json":
        return printable(path.stem)[:200]
    hub = path.parents[2].name if path.parent.parent.name == "snapshots" else ""
    return printable(hub.rpartition("--")[2] or path.parent.name or path.stem)[:200]


def head_problems(
    hidden: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None, kv_key: str
) -> Iterator[Problem]:
    """Yield the errors in the sizes of a model's heads.

    `num_kv_heads` must divide `num_heads`; if it is None, it is `num_heads`. `num_heads` must divide `hidden`
    where `head_dim` is None. `kv_key` is the key of `num_kv_heads` in the file.
    """
    if num_heads % (num_kv_heads or num_heads):
        yield Problem(kv_key, f"{num_kv_heads} does not divide the {num_heads} heads; give a divisor")
    if head_dim is None and hidden % num_heads:
        yield Problem(
            "head_dim", f"missing, and {num_heads} heads do not divide hidden {hidden}; give head_dim"
        )


class _ConfigReader:
    """A config whose sizes are read one by one, and the problems that this has shown so far."""

    def __init__(self, data: dict[str, Any], known: KnownModelType | None = None) -> None:
        self.data = data
        self.known = known
        self.problems: list[Problem] = []

    def optional(self, *keys: str) -> int | None:
        """Return the value of the first of `keys` that the config has and that is not null; None without one.

        A value that is no size is noted in `problems`, and 1 returned in its place.
        """
        for key in keys:
            value = self.data.get(key)
            if value is None:
                continue
            size = int(value) if isinstance(value, float) and value.is_integer() else value
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_SIZE:
                message = f"{format_value(value)} is not valid; give a whole number from 1 to {MAX_SIZE}"
                self.problems.append(Problem(key, message))
                return 1
            return size
        return None

    def required(self, keys: tuple[str, ...], what: str) -> int:
        """Return the value of the first of `keys` that the config has.

        Without one it notes that `what` is missing and returns 1.
        """
        size = self.optional(*keys)
        if size is None:
            self.problems.append(Problem(keys[0], f"missing; give {what} as {' or '.join(keys)}"))
            return 1
        return size

    def kv_heads(self) -> int | None:
        """Return the number of key and value heads; None if there are as many as query heads."""
        attention = self.data.get("attn_config")  # of MPT
        if isinstance(attention, dict):
            if attention.get("attn_type") == "multiquery_attention":
                return 1
            grouped = _ConfigReader({"attn_config.kv_n_heads": attention.get("kv_n_heads")})
            kv_heads = grouped.optional("attn_config.kv_n_heads")
            self.problems += grouped.problems
        else:
            kv_heads = self.optional(*KV_HEADS)
        multi_query = self.data.get("multi_query")
        if multi_query is None or self.data.get("new_decoder_architecture"):
            return kv_heads
        return 1 if multi_query else None  # of GPTBigCode and the first Falcons, which read no number

    def ffn_hidden(self, hidden: int) -> int:
        """Return the inner size of the FFN.

        Where the config does not say, it is `expansion_ratio` (else 4) times the hidden size; for families without
        that default, what is missing is noted too.
        """
        ffn = self.optional(*FFN)
        if ffn is not None:
            return ffn
        if not (self.known and self.known.default_ffn) and not {"n_embd", "n_embed"} & self.data.keys():
            self.problems.append(Problem(FFN[0], "missing; give the inner size of the FFN"))
        return (self.optional("expansion_ratio") or 4) * hidden

    @property
    def has_gated_ffn(self) -> bool:
        """Return whether the FFN is gated, by the family or else by the activation."""
        if self.known:
            return self.known.is_gated
        return any(self.data.get(key) in _GATED_ACTIVATIONS for key in ACTIVATION)
