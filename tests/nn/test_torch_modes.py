"""Products under autocast, inference mode and torch.compile, and the default transport, on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the torch rung cannot run here")
from sections import launched

from meshweave.execute.memory.shared import why_unavailable
from meshweave.execute.ranks.launch import launch
from shared_launch import SharedLaunch

HERE = {"PYTHONPATH": str(Path(__file__).parent)}
MODULE = "torch_mode_rank_functions"
SECTIONS = {
    "autocast": f"{MODULE}:autocast",
    "inference mode": f"{MODULE}:inference",
    "torch.compile": f"{MODULE}:compiled",
    "the default transport": f"{MODULE}:default",
}


@pytest.fixture(scope="module")
def findings(launch_once: SharedLaunch) -> list[dict[str, list[str]]]:
    """One launch for all of them: starting processes is what takes time."""
    return launched(launch_once, "matmul_rank_functions:sections", SECTIONS, HERE)


@pytest.mark.gloo
@pytest.mark.skipif(bool(why_unavailable()), reason=f"shared memory {why_unavailable()}")
@pytest.mark.parametrize("section", SECTIONS)
def test_products_in_modes_of_torch(section: str, findings: list[dict[str, list[str]]]) -> None:
    assert [answer[SECTIONS[section]] for answer in findings] == [[]] * 4


@pytest.mark.gloo
@pytest.mark.slow
def test_products_in_graphs_of_every_backend() -> None:
    section = f"{MODULE}:compiled_by_inductor"
    assert [
        one[section]
        for one in launched(launch, "matmul_rank_functions:sections", {"inductor": section}, HERE)
    ] == [[]] * 4


def test_ranks_of_other_network_namespaces_are_on_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lab's hosts are namespaces of one machine: memory that they shared would bypass their links."""
    from meshweave.nn import transports

    here = transports._host()
    assert here == transports._host()
    monkeypatch.setattr(transports.Path, "readlink", lambda path: Path("net:[1]"))
    assert transports._host() != here
