"""Recipes of low precision: which products of training run in it, what stays in 16 bits, and what that costs.

Of a layer the products with weights run in low precision, forward and for both gradients. Attention, norms, what
stands between products, embedding, head and loss stay in 16 bits, and so do the weights that are updated, and what
is communicated but for `gathered_bytes`.

A product Y = X W is quantized along what it sums over. So X is needed by rows for Y, and by columns for the
gradient of W; the gradient of Y by rows for that of X, and by columns for that of W (Micikevicius et al., FP8
formats for deep learning, 2022; Transformer Engine's rowwise and columnwise data).
`quantizing` counts the casts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, get_args

from meshweave.algorithms.block.sized import ProductPart
from meshweave.base.errors import DescriptionError, did_you_mean
from meshweave.describe.machine.chip import Chip
from meshweave.describe.machine.measured_file import LOW_PRECISIONS

PRODUCT_PARTS: tuple[ProductPart, ...] = get_args(ProductPart)


class ProductDtypes(NamedTuple):
    """The dtype by whose measured kernels each of the three products is priced; None for the step's `dtype`.

    They are the forward product, dgrad (the gradient of its operand) and wgrad (the gradient of its weights).
    """

    forward: str | None = None
    dgrad: str | None = None
    wgrad: str | None = None


@dataclass(frozen=True)
class Precision:
    """A recipe of low precision for the products with weights.

    Attributes:
        kernels: dtypes of measured products (`LOW_PRECISIONS`). The first that was measured on a chip prices the
            recipe there; where that is not `own`, results say so (`reading_on`).
        own: the dtype that is the recipe's own; "" where none was measured anywhere.
        parts: which of the three products of training run in it.
        item_bytes: bytes an element with its scales.
        finds_maximum: whether a pass looks for the greatest element before each cast: scales of whole tensors
            that follow from what is cast. Scales of the last steps, of rows or of blocks need no pass of their
            own.
        weight_bytes: bytes of one weight of a layer on a chip, its copies by rows and by columns included.
        gathered_bytes: bytes of one weight as ZeRO gathers it.
        source: where the recipe is published.
    """

    name: str
    kernels: tuple[str, ...]
    own: str
    item_bytes: float
    weight_bytes: float
    gathered_bytes: float
    source: str
    finds_maximum: bool = False
    parts: tuple[ProductPart, ...] = PRODUCT_PARTS

    def dtype_on(self, chip: Chip) -> str:
        """Return the dtype of the chip's measured kernels by which the recipe is priced.

        Raises:
            DescriptionError: no kernels of the recipe were measured on the chip.
        """
        measured = [name for name, _ in chip.kernels.products] if chip.kernels else []
        for dtype in self.kernels:
            if dtype in measured:
                return dtype
        there = [name for name, each in PRECISIONS.items() if set(each.kernels) & set(measured)]
        raise DescriptionError(
            f"precision {self.name}: its products were not measured on chip {chip.name}; "
            + (f"there {_are(there)}" if there else "none below 16 bits was; leave precision out")
        )

    def products_on(self, chip: Chip) -> ProductDtypes:
        """Return for each of the three products the dtype that prices it on a chip; None for the step's dtype.

        Raises:
            DescriptionError: no kernels of the recipe were measured on the chip.
        """
        dtype = self.dtype_on(chip)
        return ProductDtypes(*(dtype if part in self.parts else None for part in PRODUCT_PARTS))

    def reading_on(self, chip: Chip) -> str:
        """Return words that say by which other dtype the recipe is priced on a chip; "" if by `own`.

        Raises:
            DescriptionError: no kernels of the recipe were measured on the chip.
        """
        dtype = self.dtype_on(chip)
        if dtype == self.own:
            return ""
        why = "was measured nowhere" if not self.own else f"was not measured on {chip.name}"
        return f"{self.name} {why}: its products are priced as {dtype}, which {_SCALES[dtype]} (a reading)"


def _are(names: list[str]) -> str:
    return f"are {', '.join(names)}" if len(names) > 1 else f"is {names[0]}"


_SCALES = {
    "fp8": "has a scale a row and a column",
    "fp8_tensor": "has a scale a tensor",
    "fp8_block": "has scales of 1 x 128 and 128 x 128 parts",
    "nvfp4": "has a scale for 16 elements",
}
assert tuple(_SCALES) == LOW_PRECISIONS
_TE = "NVIDIA, Transformer Engine, common/recipe"
_TORCHAO = "torchao.float8, README and Float8LinearConfig"
_RECIPES = (
    Precision("fp8-delayed", ("fp8_tensor", "fp8"), "fp8_tensor", 1.0, 2.0, 1.0, f"{_TE}: DelayedScaling"),
    Precision(
        *("fp8-current", ("fp8_tensor", "fp8"), "fp8_tensor", 1.0, 2.0, 1.0),
        source=f"{_TE}: Float8CurrentScaling",
        finds_maximum=True,
    ),
    Precision("fp8-token", ("fp8",), "fp8", 1.0, 4.0, 2.0, f"{_TORCHAO}: rowwise"),
    Precision(
        *("fp8-block", ("fp8_block",), "fp8_block", 1 + 4 / 128, 2 * (1 + 4 / 128**2), 1 + 4 / 128**2),
        source=f"DeepSeek-V3, arXiv 2412.19437, section 3.3; {_TE}: Float8BlockScaling",
    ),
    Precision(
        *("mxfp8", ("fp8_block",), "", 1 + 1 / 32, 2 * (1 + 1 / 32), 2.0),
        source=f"OCP Microscaling Formats 1.0; {_TE}: MXFP8BlockScaling",
    ),
    Precision(
        *("nvfp4", ("nvfp4",), "nvfp4", 0.5 + 1 / 16, 2 + 2 * (0.5 + 1 / 16), 2.0),
        source=f"Pretraining LLMs with NVFP4, arXiv 2509.25149; {_TE}: NVFP4BlockScaling",
        finds_maximum=True,
    ),
    Precision(
        *("mxfp4", ("nvfp4",), "", 0.5 + 1 / 32, 2 + 2 * (0.5 + 1 / 32), 2.0),
        source="Training LLMs with MXFP4, arXiv 2502.20586: both gradients, the result in 16 bits",
        parts=("dgrad", "wgrad"),
    ),
)
PRECISIONS = {each.name: each for each in _RECIPES}
"""The recipes by name. fp8-delayed, fp8-current and fp8-block keep weights in fp8 by rows and by columns, and
gather them so (`fp8_model_init`, FSDP's float8 all-gather). MXFP8's scales of rows and of columns differ, so
that weights are gathered in 16 bits and cast there; NVFP4's likewise, beside the weights in 16 bits. The scale
of a whole tensor above NVFP4's blocks follows from its greatest element."""


def precision_named(name: str) -> Precision:
    """Return the recipe of this name in `PRECISIONS`, or else the first whose `own` dtype it is.

    So "fp8_tensor", the own dtype of fp8-delayed and fp8-current, gives fp8-delayed.

    Raises:
        DescriptionError: there is neither.
    """
    if name in PRECISIONS:
        return PRECISIONS[name]
    for each in _RECIPES:
        if name and each.own == name:
            return each
    raise DescriptionError(
        f"there is no precision '{name}'{did_you_mean(name, PRECISIONS)}; there are {', '.join(PRECISIONS)}"
    )
