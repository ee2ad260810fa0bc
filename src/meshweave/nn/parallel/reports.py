"""What `parallelize` says that it has done."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshweave.nn.parallel.strategy import LayerStrategy


@dataclass(frozen=True)
class ModelSettings:
    """How a model is put on ranks, whatever runs it.

    Attributes:
        title: what it is taken for.
        recompute: whether layers are computed again for gradients.
        proved: what was proved of it, for its report.
        debug_every: as of `parallelize`.
    """

    strategy: LayerStrategy
    title: str
    recompute: bool
    proved: str = ""
    debug_every: int = 0

    def of(self, proved: str, debug_every: int) -> ModelSettings:
        """Return these settings with `proved` and `debug_every` replaced."""
        return replace(self, proved=proved, debug_every=debug_every)


@dataclass(frozen=True)
class ParallelReport:
    """What `parallelize` has replaced in a model, and what it has left.

    Attributes:
        model: what the model was recognised as.
        strategy: the name of the strategy, and its mesh.
        replaced: the names of modules with what stands there now.
        left: the names of modules that were left, each with the reason.
        overlap: what communication runs beside.
        proved: what was compared with the model's own forward pass.
    """

    model: str
    strategy: str
    replaced: tuple[tuple[str, str], ...]
    left: tuple[tuple[str, str], ...]
    overlap: str
    proved: str

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.strategy}", f"replaced: {len(self.replaced)} modules"]
        lines += [f"  {name}: {what}" for name, what in self.replaced]
        lines.append(f"left: {len(self.left)} modules")
        lines += [f"  {name}: {why}" for name, why in self.left]
        lines += [f"overlap: {self.overlap}", f"proved: {self.proved}"]
        return "\n".join(lines)
