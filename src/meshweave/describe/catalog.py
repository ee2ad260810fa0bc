"""The descriptions that ship with the package: clusters and models by name."""

from __future__ import annotations

from importlib.resources import files

from meshweave.base.errors import DescriptionError, nearest


def _names(kind: str) -> tuple[str, ...]:
    entries = (files("meshweave") / "catalog" / kind).iterdir()
    return tuple(sorted(entry.name[: -len(".toml")] for entry in entries if entry.name.endswith(".toml")))


def cluster_names() -> tuple[str, ...]:
    """Names that `load_cluster` knows, sorted."""
    return _names("clusters")


def model_names() -> tuple[str, ...]:
    """Names that `load_model` knows, sorted."""
    return _names("models")


def catalog_text(kind: str, name: str) -> str:
    """The TOML text of a catalog entry; `kind` is `clusters` or `models`.

    Raises DescriptionError, with the nearest known name, for a name that the catalog does not have.
    """
    known = _names(kind)
    if name not in known:
        word = "".join(c if c.isprintable() else "?" for c in name[:100])
        raise DescriptionError(
            f"'{word}' is neither a catalog entry nor a file{nearest(name, known)}; "
            f"the catalog's {kind} are {', '.join(known)}"
        )
    return (files("meshweave") / "catalog" / kind / f"{name}.toml").read_text(encoding="utf-8")
