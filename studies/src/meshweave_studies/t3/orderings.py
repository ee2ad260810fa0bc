"""The orderings that T3's text states, each checked in every case that it speaks of.

A row of the table compares sizes with sizes. An ordering says only which of two times or counts is the larger
one, so it can hold where the size is off, and fail where the size is near. All cases are computed from the runs
of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from meshweave_studies.gpu.kernels import Source
from meshweave_studies.reproduction import CheckedOrdering
from meshweave_studies.t3.end_to_end import BASES, Phase
from meshweave_studies.t3.groups import (
    BIG,
    DOUBLED,
    SHARED,
    SMALL,
    all_times,
    iterations,
    twice_gain,
    twice_jobs,
)
from meshweave_studies.t3.models import SMALL_DEGREES, STUDIED, SubLayer
from meshweave_studies.t3.study import (
    GPU,
    GPU_2X,
    SEQUENTIAL,
    SPLITS,
    T3,
    T3_MCA,
    GpuJob,
    T3Study,
    Times,
    shared_times,
    split_job,
)

Case = tuple[str, bool]
"""What an ordering is checked in, and whether it holds there."""


@dataclass(frozen=True)
class _Stated:
    """A sentence of the paper, where it stands, and the cases that it speaks of."""

    statement: str
    where: str
    cases: Callable[[T3Study], Iterable[Case]]

    def check(self, study: T3Study) -> CheckedOrdering:
        """Return in how many cases of a study the statement holds, and in which it does not."""
        cases = tuple(self.cases(study))
        wrong = tuple(name for name, holds in cases if not holds)
        return CheckedOrdering(self.statement, self.where, len(cases), wrong)


# --- times -------------------------------------------------------------------------------------------------------


def _times(study: T3Study, holds: Callable[[Times], bool]) -> Iterator[Case]:
    """Yield the sub-layers of table 2 and of section 6.4."""
    yield from ((str(layer), holds(one)) for layer, one in all_times(study, (*SMALL, *BIG)).items())


def _product(study: T3Study, slower: Literal["T3", "MCA"]) -> Iterator[Case]:
    """Yield whether T3's product is slower than alone, or no faster than T3-MCA's."""
    for layer in SMALL:
        alone, fused, mca = (
            study.run(GpuJob(layer.product, what)).kernel_ps("product") for what in (SEQUENTIAL, T3, T3_MCA)
        )
        yield str(layer), fused > alone if slower == "T3" else mca <= fused


def _shared(study: T3Study, what: Literal["potential", "all-reduce", "product"]) -> Iterator[Case]:
    study.prefetch(split_job(layer, split) for layer in SHARED for split in ("ideal", *SPLITS))
    for layer in SHARED:
        ideal, few, more = (shared_times(study, layer, split) for split in ("ideal", "72-8", "64-16"))
        holds = {
            "potential": ideal.potential > more.potential > few.potential,
            "all-reduce": few.split_all_reduce > more.split_all_reduce > ideal.all_reduce,
            "product": more.split_product > few.split_product > ideal.product,
        }
        yield str(layer), holds[what]


def _twice(study: T3Study, name: str) -> Iterator[Case]:
    study.prefetch(twice_jobs())
    for layer in DOUBLED[name]:
        before, after = (twice_gain(study, layer, gpu) for gpu in (GPU, GPU_2X))
        yield str(layer), after > before if name == "FC-2" else after < before


# --- memory ------------------------------------------------------------------------------------------------------


def _ratio(study: T3Study, layer: SubLayer, sources: tuple[Source, ...]) -> float:
    """Return bytes of some sources, sequential over T3-MCA."""
    before, after = (study.traffic(layer, what) for what in (SEQUENTIAL, T3_MCA))
    return sum(before[source] for source in sources) / sum(after[source] for source in sources)


def _fewer(study: T3Study, sources: tuple[Source, ...]) -> Iterator[Case]:
    all_times(study, SMALL)
    yield from ((str(layer), _ratio(study, layer, sources) > 1) for layer in SMALL)


def _by_degree(value: Callable[[SubLayer], float], larger_at: int) -> Iterator[Case]:
    """Yield whether a value of each sub-layer is larger at one of the two degrees."""
    small, large = SMALL_DEGREES
    for layer in SMALL:
        if layer.degree == small:
            at_small, at_large = value(layer), value(SubLayer(layer.model, large, layer.name))
            holds = at_small > at_large if larger_at == small else at_large > at_small
            yield f"{layer.model}, {layer.name}", holds


def _ratio_by_degree(study: T3Study, sources: tuple[Source, ...], larger_at: int) -> Iterator[Case]:
    all_times(study, SMALL)
    return _by_degree(lambda layer: _ratio(study, layer, sources), larger_at)


def _near_memory_by_degree(study: T3Study) -> Iterator[Case]:
    times = all_times(study, SMALL)
    return _by_degree(lambda layer: times[layer].reduce_scatter / times[layer].near_memory, SMALL_DEGREES[0])


# --- end to end --------------------------------------------------------------------------------------------------


def _iterations(study: T3Study, what: Literal["MCA", "prompt", "degree"]) -> Iterator[Case]:
    phases: tuple[Phase, ...] = ("training", "prompt")
    for basis in BASES:
        training, prompt = (iterations(study, STUDIED, phase, basis) for phase in phases)
        if what == "prompt":
            for name, one in prompt.items():
                yield f"{name}, {basis}", one.gain("mca") > training[name].gain("mca")
            continue
        for phase, of_model in zip(phases, (training, prompt), strict=True):
            if what == "MCA":
                for name, one in of_model.items():
                    yield f"{name}, {phase} {basis}", one.gain("mca") > one.gain("t3") > 0
            else:
                for model in STUDIED:
                    low, high = (of_model[f"{model} TP {degree}"].gain("mca") for degree in SMALL_DEGREES)
                    yield f"{model}, {phase} {basis}", high > low


_WRITES = (Source.PRODUCT_WRITE, Source.REDUCE_SCATTER_WRITE)
_RS_READ, _PRODUCT_READ = (Source.REDUCE_SCATTER_READ,), (Source.PRODUCT_READ,)
STATED = (
    _Stated(
        "T3 is faster than sequential", "figure 16", partial(_times, holds=lambda x: x.t3 < x.sequential)
    ),
    _Stated("T3-MCA is faster than T3", "figure 16", partial(_times, holds=lambda x: x.mca < x.t3)),
    _Stated(
        "T3-MCA is no faster than ideal overlap with near-memory reduction",
        "figure 16",
        partial(_times, holds=lambda x: x.mca >= x.ideal_near_memory),
    ),
    _Stated(
        "a reduce-scatter that adds near memory is faster",
        "section 6.1.1",
        partial(_times, holds=lambda x: x.near_memory < x.reduce_scatter),
    ),
    _Stated("near memory gains more at TP 8 than at TP 16", "section 6.1.1", _near_memory_by_degree),
    _Stated("T3 slows the product", "figure 17", partial(_product, slower="T3")),
    _Stated("T3-MCA slows the product no more than T3", "section 6.1.3", partial(_product, slower="MCA")),
    _Stated("T3-MCA has fewer DRAM accesses", "figure 18", partial(_fewer, sources=tuple(Source))),
    _Stated("of them fewer reads of the reduce-scatter", "figure 18", partial(_fewer, sources=_RS_READ)),
    _Stated("of them fewer writes", "figure 18", partial(_fewer, sources=_WRITES)),
    _Stated("of them fewer reads of the product", "figure 18", partial(_fewer, sources=_PRODUCT_READ)),
    _Stated(
        "reads of the reduce-scatter fall more at TP 8 than at TP 16",
        "section 6.2",
        partial(_ratio_by_degree, sources=_RS_READ, larger_at=8),
    ),
    _Stated(
        "writes fall more at TP 8 than at TP 16",
        "section 6.2",
        partial(_ratio_by_degree, sources=_WRITES, larger_at=8),
    ),
    _Stated(
        "reads of the product fall more at TP 16 than at TP 8",
        "section 6.2",
        partial(_ratio_by_degree, sources=_PRODUCT_READ, larger_at=16),
    ),
    _Stated(
        "potential speed-up: all units, then 64-16, then 72-8",
        "figure 6",
        partial(_shared, what="potential"),
    ),
    _Stated("the all-reduce is slower with fewer units", "figure 6", partial(_shared, what="all-reduce")),
    _Stated("the product is slower with fewer units", "figure 6", partial(_shared, what="product")),
    _Stated(
        "iterations: T3-MCA gains more than T3, and T3 gains", "figure 19", partial(_iterations, what="MCA")
    ),
    _Stated("prompts gain more than training", "section 6.3", partial(_iterations, what="prompt")),
    _Stated("iterations gain more at TP 16 than at TP 8", "section 6.3", partial(_iterations, what="degree")),
    _Stated("FC-2 gains more with twice the compute", "figure 20", partial(_twice, name="FC-2")),
    _Stated("OP gains less with twice the compute", "figure 20", partial(_twice, name="OP")),
)
"""The sentences, in the order of the table."""


def orderings(study: T3Study) -> tuple[CheckedOrdering, ...]:
    """Return all orderings that the text states, checked."""
    return tuple(stated.check(study) for stated in STATED)
