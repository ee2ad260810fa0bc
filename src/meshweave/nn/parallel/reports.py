"""What `parallelize` says that it has done."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshweave.nn.parallel.strategy import LayerStrategy


@dataclass(frozen=True)
class ModelSettings:
    """How a model is put on ranks, whatever runs it.

    Attributes:
        title: what the model was recognised as, for reports and errors.
        recompute: whether layers are computed again for gradients.
        proved: a phrase on what was proved of it, for its report.
        debug_every: ranks compare all that they must have alike in the first forward call, and in each
            `debug_every`-th; 0 for the first alone.
        adapted: names of its layers that have adapters, which are put back into what takes their places.
    """

    strategy: LayerStrategy
    title: str
    recompute: bool
    proved: str = ""
    debug_every: int = 0
    adapted: tuple[str, ...] = ()

    def of(self, proved: str, debug_every: int, adapted: tuple[str, ...] = ()) -> ModelSettings:
        """Return these settings with `proved`, `debug_every` and `adapted` replaced."""
        return replace(self, proved=proved, debug_every=debug_every, adapted=adapted)


@dataclass(frozen=True)
class ParallelReport:
    """What `parallelize` has replaced in a model, and what it has left.

    Attributes:
        model: what the model was recognised as, such as "GPT-2", or its class and the version of transformers.
        strategy: the name of the strategy, and its mesh, as a phrase.
        replaced: (name of a module, class of what stands there now).
        left: (name, reason) of what was left: modules, or in models of transformers parameters.
        overlap: text for printing: what communication runs beside.
        proved: text for printing: what was compared with the model's own forward pass, or that nothing was.
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
        lines.append(f"left: {len(self.left)}")
        lines += [f"  {name}: {why}" for name, why in self.left]
        lines += [f"overlap: {self.overlap}", f"proved: {self.proved}"]
        return "\n".join(lines)
