"""Every catalog entry loads and says where its numbers are from; whatever a file holds, its problems are lines."""

import copy
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from meshweave.base.errors import DescriptionError, MeshweaveError
from meshweave.describe.catalog import catalog_text, clusters, models
from meshweave.describe.like import table_like
from meshweave.describe.machine.cluster import load_cluster
from meshweave.describe.machine.kernels_file import kernels_from
from meshweave.describe.machine.links import COMM_KINDS, NetworkAxis
from meshweave.describe.machine.network import FullMeshNetwork, HostsNetwork, TorusNetwork
from meshweave.describe.machine.tree import TreeNetwork
from meshweave.describe.model import load_model
from sampling import examples

LOADERS = {"clusters": load_cluster, "models": load_model}
ENTRIES = [("clusters", n) for n in clusters()] + [("models", n) for n in models()]
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "vocab_size": 50257,
}
LEAVES = {"name": "leaf", "link_bytes_per_s": 25e9, "ways": 2, "source": "made up"}
TREE = {
    **tomllib.loads(catalog_text("clusters", "dgx-a100")),
    "network": {
        "kind": "tree",
        "levels": [
            {"fanout": 8, "axis": LEAVES},
            {"fanout": 4, "links": 2, "axis": {**LEAVES, "name": "spine"}},
        ],
    },
}
SEEDS = {
    "clusters": [*(tomllib.loads(catalog_text("clusters", n)) for n in clusters()), TREE],
    "models": [tomllib.loads(catalog_text("models", n)) for n in models()],
    "hf": [GPT2],
}


def one_line(error: BaseException) -> None:
    assert isinstance(error, MeshweaveError)
    assert len(str(error).splitlines()) == 1, str(error)


def one_line_a_problem(error: BaseException) -> None:
    """One line, or a headline with a number of problems and an indented line for each."""
    assert isinstance(error, MeshweaveError)
    headline, *problems = str(error).split("\n")
    assert all(line.isprintable() for line in (headline, *problems)), str(error)
    if problems:
        count = int(re.search(r": (\d+) problems$", headline)[1])  # type: ignore[index]
        assert len(problems) == min(count, 21) > 1
        assert all(line.startswith("  ") for line in problems)


def numbers_without_source(table: Any, covered: bool = False) -> bool:
    if isinstance(table, list):
        return any(numbers_without_source(item, covered) for item in table)
    if not isinstance(table, dict):
        return isinstance(table, float) and not covered
    covered = covered or bool(table.get("source"))
    return any(numbers_without_source(value, covered) for value in table.values())


@pytest.mark.parametrize("kind, name", ENTRIES)
def test_entry_loads_under_its_own_name(kind: str, name: str) -> None:
    entry = LOADERS[kind](name)
    assert entry.name == name
    assert entry.source
    assert hash(entry) is not None


@pytest.mark.parametrize("name", clusters())
def test_every_table_of_a_cluster_has_a_source(name: str) -> None:
    own = tomllib.loads(catalog_text("clusters", name))
    table = table_like("clusters", own, name)
    assert own["source"] and table["chip"]["source"]
    assert not numbers_without_source(table["network"])


@pytest.mark.parametrize("name", clusters())
def test_no_collective_beats_its_links(name: str) -> None:
    network = load_cluster(name).network
    axes: tuple[NetworkAxis, ...]
    if isinstance(network, TorusNetwork):
        axes = network.axes
    elif isinstance(network, HostsNetwork):
        axes = (network.intra, network.nic)
    elif isinstance(network, FullMeshNetwork):
        axes = (network.inner, network.link)
    elif isinstance(network, TreeNetwork):
        axes = tuple(level.axis for level in network.levels)
    else:
        axes = (network.link,)
    for axis in axes:
        for kind in COMM_KINDS:
            assert axis.comm(kind).bytes_per_s <= axis.num_directions * axis.link_bytes_per_s


@pytest.mark.parametrize("load", LOADERS.values())
@pytest.mark.parametrize(
    "name", ["nope", "", "a\nb", "a\0b", "\ud800", "x/y.toml", "x\0.toml", ":", "x" * 9999]
)
def test_unknown_names_are_one_line(load: Any, name: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        load(name)
    one_line(caught.value)


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(DescriptionError, match="did you mean 'tpu-v4-pod'"):
        load_cluster("tpu-v4-pd")
    with pytest.raises(DescriptionError, match="did you mean 'gpt3'"):
        load_model("gpt-3")


@pytest.mark.parametrize("load", LOADERS.values())
@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "broken.toml: is empty"),
        (b"  \n", "is empty"),
        (b"\xff\xfe\x00\x01", "not UTF-8"),
        (b"a = [", "broken.toml: is not valid TOML"),
        (b"a = " + b"[" * 100000, "levels of nested tables and lists, which is the limit"),
        (b"a = " + b"1" * 5000, "not valid TOML"),
    ],
)
def test_broken_files(load: Any, content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(DescriptionError, match=says) as e:
        load(path)
    one_line(e.value)
    with pytest.raises(DescriptionError, match="no such file"):
        load(tmp_path / "absent.toml")


@pytest.mark.parametrize("content", ["[", "[1]", "3", "NaN", '"x"', "null", "[" * 100000, "1" * 5000, ""])
def test_broken_json(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    for load in LOADERS.values():
        with pytest.raises(DescriptionError) as caught:
            load(path)
        one_line(caught.value)


def test_directory_is_not_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match="is a directory"):
        load_cluster(tmp_path)
    with pytest.raises(DescriptionError, match=re.escape("config.json: no such file")):
        load_model(tmp_path)


def test_catalog_wins_over_a_file_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt3").mkdir()
    (tmp_path / "local-cpu").mkdir()
    assert load_model("gpt3").num_layers == 96
    assert load_cluster("local-cpu:8").num_chips == 8


# --- fuzz: whatever the file holds, nothing but a MeshweaveError of a line a problem comes out


def survives(load: Any, path: Path) -> None:
    try:
        load(path)
    except MeshweaveError as error:
        one_line_a_problem(error)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 10**400, 2**64, 0.5, 1e308, -0.0, float("inf"), float("nan"), "", "12", [], {}]),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


def paths(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [at, *(path for key, value in items for path in paths(value, (*at, key)))]


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    root = {"": copy.deepcopy(draw(st.sampled_from([seed for seeds in SEEDS.values() for seed in seeds])))}
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from([p for p in paths(root) if p]))
        node: Any = root
        for key in parents:
            node = node[key]
        action = draw(st.sampled_from(["replace", "delete", "rename"]))
        if action == "replace" or isinstance(node, list):
            node[last] = draw(ODD)
        elif parents:
            value = node.pop(last)
            if action == "rename":
                node[draw(st.text(max_size=12)) or f"{last}x"] = value
    return root[""]


FUZZ = examples(400, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(data=st.binary(max_size=200), suffix=st.sampled_from([".toml", ".json"]))
def test_random_bytes(data: bytes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"random{suffix}"
    path.write_bytes(data)
    for load in LOADERS.values():
        survives(load, path)


@FUZZ
@given(data=mutated())
def test_mutated_values(data: Any, tmp_path: Path) -> None:
    path = tmp_path / "mutated.json"
    path.write_text(json.dumps(data))
    for load in LOADERS.values():
        survives(load, path)


@FUZZ
@given(entry=st.sampled_from(ENTRIES), draw=st.data())
def test_mutated_text(entry: tuple[str, str], draw: st.DataObject, tmp_path: Path) -> None:
    kind, name = entry
    text = catalog_text(kind, name)
    start = draw.draw(st.integers(0, len(text)))
    stop = draw.draw(st.integers(start, min(len(text), start + 20)))
    text = text[:start] + draw.draw(st.text(max_size=6)) + text[stop:]
    path = tmp_path / "mutated.toml"
    path.write_bytes(text.encode("utf-8", "replace"))
    survives(LOADERS[kind], path)


@FUZZ
@given(name=st.text(max_size=30))
def test_random_names(name: str) -> None:
    for load in LOADERS.values():
        survives(load, name)  # type: ignore[arg-type]


def test_of_a_product_that_was_measured_twice_the_fastest_counts(tmp_path: Path) -> None:
    rows = ("5", "2", "3")
    text = "".join(f"chip,bfloat16,64,32,16,{time}\n" for time in rows)
    (tmp_path / "rows.csv").write_text(f"device,dtype,m,n,k,latency_ms\n{text}")
    table = {"dtypes": ["bfloat16"], "file": "rows.csv", "device": "chip", "dtype": "bfloat16"}
    kernels = kernels_from({"name": "chip", "source": "here", "tables": [table]}, "kernels.toml", tmp_path)
    measured = kernels.table("bfloat16")
    assert measured is not None and measured.points == ((64, 32, 16, 0.002),)
