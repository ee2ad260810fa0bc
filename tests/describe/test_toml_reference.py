"""The references of keys and limits are generated, and the committed pages are what the generator writes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from meshweave.describe.machine import cluster_file, gpu, kernels_file
from meshweave.describe.model import model_file

DOCS = Path(__file__).parents[2] / "docs"
MODELS = [
    model
    for module in (cluster_file, kernels_file, gpu, model_file)
    for model in vars(module).values()
    if isinstance(model, type) and issubclass(model, BaseModel) and model.__module__ == module.__name__
]


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    committed = (DOCS / "reference" / "descriptions.md").read_text(encoding="utf-8")
    assert committed == generate.page(), "run python docs/generate.py"
    limits = (DOCS / "reference" / "limits.md").read_text(encoding="utf-8")
    assert limits == generate.limits_page(), "run python docs/generate.py"
    titles = re.findall(r"^#+ (.*)$", committed, re.MULTILINE)
    anchors = {title.lower().replace(" ", "-").replace(".", "") for title in titles}
    assert set(re.findall(r"\]\(#(.*?)\)", committed)) <= anchors


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_key_is_described_and_on_the_page(model: type[BaseModel]) -> None:
    page = (DOCS / "reference" / "descriptions.md").read_text(encoding="utf-8")
    assert model.model_fields and model.__doc__
    for name, field in model.model_fields.items():
        key = field.alias or name
        assert field.description and f"| `{key}` | " in page
