"""What defines a transformer beside the sizes that its price follows from, and what of it has no price."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from meshweave.base.limits import FILE_BYTES
from meshweave.describe.files import key, require_printable, whole_float_to_int
from meshweave.describe.model.workload import MAX_SIZE

Norm = Literal["rms", "layer"]
Positions = Literal["rotary", "learned", "alibi", "other"]
Residual = Literal["", "parallel", "parallel with one norm"]
NormPlaces = Literal["", "before and after"]


ModelSize = Annotated[int, BeforeValidator(whole_float_to_int), Field(ge=1, le=MAX_SIZE)]
Words = Annotated[str, Field(max_length=100_000), AfterValidator(require_printable)]


def _require_json_table(text: str) -> str:
    """Return the text of a JSON table, or "". Raises ValueError."""
    try:
        if not text or isinstance(json.loads(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    raise ValueError("no table of JSON")


JsonTable = Annotated[str, Field(max_length=FILE_BYTES.most), AfterValidator(_require_json_table)]


@dataclass(frozen=True)
class Architecture:
    """What other software needs besides sizes to train the same model; None where a description does not say.

    Attributes:
        model_type: the family, as transformers names it; "" where it is none of them.
        norm, norm_eps: the kind of normalisation, and what it adds to a variance.
        activation: of the FFN, as transformers names it, such as "silu" or "gelu_new".
        qkv_bias, out_bias, ffn_bias: whether the projections to queries, keys and values, that of attention's
            output, and those of the FFN add a bias.
        positions: the kind of position encoding.
        max_positions: the most tokens of a sequence that the model is made for.
        rotary_base, rotary_share: the base of rotary angles, and the share of a head that turns.
        rotary_scaling: how angles are scaled for longer sequences, as JSON; "" for not at all.
        window: the number of tokens that a token attends to in layers with the window; None without a window.
        windowed_layers: the number of layers that have the window; None for all layers.
        residual: "" where the parts of a layer follow each other; "parallel" where both read the residual,
            each after a norm of its own, and are added at once; "parallel with one norm" where they share it.
        norms: "" where a norm precedes each part; "before and after" where one follows it, too.
        qk_norm: whether queries and keys are normalised.
        init_std: the standard deviation of initial weights.
        others: further keys of a config that change what is computed, with their values, as "key = value".
    """

    model_type: Annotated[Words, key("the family, as transformers names it, a string")] = ""
    norm: Annotated[Norm | None, key("the norm: rms or layer")] = None
    norm_eps: Annotated[float | None, key("what the norm adds to a variance, a number", ge=0)] = None
    activation: Annotated[Words | None, key("the activation of the FFN, as transformers names it")] = None
    qkv_bias: Annotated[bool | None, key("true where queries, keys and values add a bias, else false")] = None
    out_bias: Annotated[bool | None, key("true where attention's output adds a bias, else false")] = None
    ffn_bias: Annotated[bool | None, key("true where the FFN adds biases, else false")] = None
    positions: Annotated[
        Positions | None, key("how tokens know their places: rotary, learned, alibi or other")
    ] = None
    max_positions: Annotated[ModelSize | None, key("the most tokens of a sequence, at least 1")] = None
    rotary_base: Annotated[float | None, key("the base of rotary angles, a positive number", gt=0)] = None
    rotary_share: Annotated[float | None, key("the share of a head that turns, to 1", gt=0)] = None
    rotary_scaling: Annotated[
        JsonTable, key("how angles are scaled for longer sequences, a table of JSON in a string")
    ] = ""
    window: Annotated[ModelSize | None, key("the tokens that a token attends to in some layers")] = None
    windowed_layers: Annotated[
        ModelSize | None, key("the number of layers that have the window (left out: all)")
    ] = None
    residual: Annotated[
        Residual,
        key("parallel, or parallel with one norm, where both parts of a layer read the same residual"),
    ] = ""
    norms: Annotated[NormPlaces, key("before and after, where a norm follows each part, too")] = ""
    qk_norm: Annotated[bool | None, key("true where queries and keys are normalised, else false")] = None
    init_std: Annotated[float | None, key("the standard deviation of initial weights", ge=0)] = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotPriced:
    """A property of a model that predictions of time and memory leave out, in a few words.

    Attributes:
        text: the property in words.
        beyond: predictions are wrong only for sequences of more tokens than this; 0: for all sequences.
    """

    text: Annotated[Words, key("what it is, a string")]
    beyond: Annotated[int, key("the most tokens of a sequence that it does not touch", ge=0)] = 0


def positions_not_priced(positions: int, *, learned: bool) -> NotPriced:
    """Return a note that sequences of more than `positions` tokens are priced as if the model had more positions.

    Args:
        learned: whether its position embeddings are learned; the note says so.
    """
    what = "learns" if learned else "is made for"
    return NotPriced(
        f"the model {what} {positions:,} positions: a longer sequence is priced as if it had more",
        beyond=positions,
    )
