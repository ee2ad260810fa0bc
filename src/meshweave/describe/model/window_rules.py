"""Which layers have the attention window where a config of transformers has no list of their kinds.

The rules are those of the classes of transformers: `validation/model_types.py` reads them into the catalog.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from meshweave.base.errors import UnsupportedError
from meshweave.base.limits import STEP_LAYERS
from meshweave.describe.files import fail, format_value
from meshweave.describe.model.config_features import layer_kinds, window_of
from meshweave.describe.model.model_types import model_type_of, model_type_table

WindowForm = Literal["all", "none", "last full", "first full", "from", "without rotary", "other"]
WINDOW_FORMS: tuple[WindowForm, ...] = get_args(WindowForm)


@dataclass(frozen=True)
class WindowRule:
    """Which layers of a family have the window of its config.

    Attributes:
        form: "all" or "none"; "last full" or "first full": all but the last or first layer of each `number`
            consecutive ones; "from": layers `number`, `number` + 1, ... of 0, 1, ...; "without rotary": those
            without rotary positions, which are the last of each `number`; "other": a rule that is not known.
        number: the number in `form`, where a config does not have it.
        key: the key under which a config has it; "" for none.
        is_optional: whether there is a window only where the config's `use_sliding_window` is true.
    """

    form: WindowForm
    number: int = 1
    key: str = ""
    is_optional: bool = False

    def windowed(self, data: Mapping[str, Any], count: int) -> list[bool]:
        """Return for each of the `count` layers of a config whether it has the window.

        Raises:
            ValueError: the rule is not known, or the config's value is not valid; its text begins with the key.
        """
        if self.form == "none" or (self.is_optional and not data.get("use_sliding_window")):
            return [False] * count
        if self.form == "all":
            return [True] * count
        if self.form == "other":
            raise ValueError("layer_types: missing, and the rule of the family is not known; give them")
        number = data.get(self.key, self.number)
        least = 0 if self.form == "from" else 1
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{self.key}: {format_value(number)} is not valid; give layer_types")
        rotary = data.get("no_rope_layers")
        if self.form == "without rotary" and isinstance(rotary, list) and len(rotary) >= count:
            return [not has for has in rotary[:count]]
        return [self._is_windowed(layer, number) for layer in range(count)]

    def _is_windowed(self, layer: int, number: int) -> bool:
        if self.form == "from":
            return layer >= number
        if self.form == "first full":
            return layer % number != 0
        is_last = (layer + 1) % number == 0
        return is_last if self.form == "without rotary" else not is_last


def window_rule(name: str) -> WindowRule | None:
    """Return the rule of the family with `model_type` `name`; None for one whose layers all have the window."""
    entry = model_type_table()["windows"].get(name)
    return None if entry is None else WindowRule(**entry)


def with_layer_kinds(data: dict[str, Any], count: int, file: str) -> dict[str, Any]:
    """Return a config of `count` layers with `layer_types`, where its family has a rule and it has a window.

    Of a config that names the kinds of more layers the first `count` are kept. One without a rule, without a
    window, or of more layers than `base.limits.STEP_LAYERS` is returned as it is. `file` is what errors name.

    Raises:
        DescriptionError: the config names the kinds of fewer layers.
        UnsupportedError: which layers have the window is not known.
    """
    named = {key: names for key, names in layer_kinds(data).items() if names}
    for key, names in named.items():
        if len(names) < count:
            fail(
                file, key, f"names the kinds of {len(names)} layers, and there are {count}; give one for each"
            )
    if named:
        return {**data, **{key: data[key][:count] for key in named}}
    rule = window_rule(model_type_of(data))
    if rule is None or window_of(data) is None or count > STEP_LAYERS.most:
        return data
    try:
        windowed = rule.windowed(data, count)
    except ValueError as error:
        raise UnsupportedError(f"{file}: {error}") from None
    return {**data, "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed]}
