"""The generated pages of the site cover the front door and the command line; `make docs` builds it."""

from __future__ import annotations

import importlib
import runpy

import pages
import pytest

import meshweave


def test_the_site_covers_everything() -> None:
    for module in ("yaml", "mkdocs"):
        pytest.importorskip(module, reason="the extra docs is not installed")
    site = runpy.run_path(str(pages.ROOT / "docs" / "site.py"))
    assert list(site["GROUPS"]) == list(meshweave._GROUPS)
    assert all(f"    {group:<13} " in (meshweave.__doc__ or "") for group in meshweave._GROUPS)
    assert all(f"    mw.{name:<10} " in (meshweave.__doc__ or "") for name in meshweave._NAMESPACES)
    text = "".join(site["api_page"](group) for group in site["GROUPS"])
    assert all(f".{name}\n" in f"{text}\n" for names in meshweave._GROUPS.values() for name in names.split())
    for module in site["NAMESPACES"]:
        page = site["module_page"](module)
        assert all(f".{name}\n" in page for name in importlib.import_module(module).__all__)
    commands = site["command_line_page"]()
    assert all(
        f"## `meshweave {verb}" in commands for verb in ("plan", "simulate", "tune layouts", "bench matmul")
    )


def test_the_site_is_read_from_a_disk() -> None:
    """Links name files, for browsers show a list of a folder where they name that; fonts come with the system."""
    yaml = pytest.importorskip("yaml", reason="the extra docs is not installed")
    config = yaml.safe_load((pages.ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8"))
    assert config["use_directory_urls"] is False and config["theme"]["font"] is False
