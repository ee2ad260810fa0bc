"""The descriptions that ship with the package: clusters and models by name."""

from __future__ import annotations

from importlib.resources import files

from meshweave.base.errors import DescriptionError, did_you_mean, listed


def _names(kind: str) -> tuple[str, ...]:
    entries = (files("meshweave") / "catalog" / kind).iterdir()
    return tuple(sorted(entry.name[: -len(".toml")] for entry in entries if entry.name.endswith(".toml")))


def clusters() -> tuple[str, ...]:
    """Return the catalog names of clusters, sorted."""
    return _names("clusters")


def models() -> tuple[str, ...]:
    """Return the catalog names of models, sorted."""
    return _names("models")


def kernel_constants_names() -> tuple[str, ...]:
    """Return the catalog names of constants of kernels (such as "h100-sxm5-80gb"), sorted."""
    return _names("kernels")


def gpu_names() -> tuple[str, ...]:
    """Return the catalog names of the GPUs that `meshweave simulate-gpu` simulates, sorted."""
    return _names("gpus")


def catalog_text(kind: str, name: str, other: str = "") -> str:
    """Return the TOML text of a catalog entry; `kind` is `clusters`, `models`, `kernels` or `gpus`.

    Args:
        other: text that follows the name in the error, such as "; give words such as '64 x H100'".

    Raises:
        DescriptionError: the catalog has no such entry; the error names a similar one, if there is one.
    """
    known = _names(kind)
    if name not in known:
        word = "".join(c if c.isprintable() else "?" for c in name[:100])
        raise DescriptionError(
            f"'{word}' is neither a catalog entry nor a file{did_you_mean(name, known)}{other}; "
            f"{kind} of the catalog: {listed(known)}; meshweave catalog {kind} lists all"
        )
    return (files("meshweave") / "catalog" / kind / f"{name}.toml").read_text(encoding="utf-8")
