"""What defines a transformer beside the sizes that its price follows from, and what of it has no price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Norm = Literal["rms", "layer"]
Positions = Literal["rotary", "learned", "alibi", "other"]
Residual = Literal["", "parallel", "parallel with one norm"]
NormPlaces = Literal["", "before and after"]


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

    model_type: str = ""
    norm: Norm | None = None
    norm_eps: float | None = None
    activation: str | None = None
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    ffn_bias: bool | None = None
    positions: Positions | None = None
    max_positions: int | None = None
    rotary_base: float | None = None
    rotary_share: float | None = None
    rotary_scaling: str = ""
    window: int | None = None
    qk_norm: bool | None = None
    init_std: float | None = None
    others: tuple[str, ...] = ()
    windowed_layers: int | None = None
    residual: Residual = ""
    norms: NormPlaces = ""


@dataclass(frozen=True)
class NotPriced:
    """A property of a model that predictions of time and memory leave out, in a few words.

    Attributes:
        beyond: only sequences of more tokens than this are priced wrongly for it; 0 for all.
    """

    text: str
    beyond: int = 0


def positions_not_priced(positions: int, *, learned: bool) -> NotPriced:
    """Return the note for sequences of more than `positions` tokens, which the model has no positions for.

    Args:
        learned: whether its position embeddings are learned, which the words of the note depend on.
    """
    what = "learns" if learned else "is made for"
    return NotPriced(
        f"the model {what} {positions:,} positions: a longer sequence is priced as if it had more",
        beyond=positions,
    )
