"""Overrides of torchtitan's components (torchtitan 0.3.0): linear layers whose products are `meshweave.matmul`s.

    torchtitan_train --module llama3 --config llama3_8b --parallelism.spmd-backend full_dtensor \\
        --override.imports meshweave.nn.plugins.torchtitan.universal_linear_layers

torchtitan shards weights and activations by its own rules; products of two DTensors then move only what a rank
needs and does not have. A layer that is given plain tensors, as with the backends spmd_types and partial_dtensor
outside of tensor parallelism, is torchtitan's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common import Linear

from meshweave.nn.linear import universal_linear


class UniversalLinear(Linear):  # type: ignore[misc]
    """torchtitan's Linear, whose product of DTensors is `meshweave.matmul`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        """The settings of torchtitan's Linear."""

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight.t() + bias: (..., features in) -> (..., features out).

        DTensors are multiplied as by `meshweave.matmul`, plain tensors as by torchtitan's Linear.
        """
        if isinstance(input, DTensor) and isinstance(self.weight, DTensor):
            return universal_linear()(input, self.weight, self.bias)
        return super().forward(input)


@override(target=Linear.Config, exact=True, description="Products of DTensors by meshweave.")  # type: ignore[untyped-decorator]
def universal_linear_layers(cfg: Linear.Config) -> UniversalLinear.Config:
    """Return, from the settings `cfg` of a Linear of torchtitan, those of the `UniversalLinear` that replaces
    it.
    """
    return derive(cfg, UniversalLinear.Config)  # type: ignore[no-any-return]
