"""What results say about the machine that they were measured on."""

from __future__ import annotations

import os

from meshweave_lab.provenance import PACKAGES, describe_environment


def test_the_machine_is_described() -> None:
    found = describe_environment()
    assert found["cores"] == os.cpu_count() and len(found["date"]) == 10 and found["system"]
    assert set(found["versions"]) == {"python", *PACKAGES}
