import subprocess

import pytest

from meshweave_lab.network.check import lab_problem


def pytest_runtest_setup(item):
    if item.get_closest_marker("lab") and lab_problem():
        pytest.skip(f"no lab on this machine: {lab_problem()}")


def snapshot():
    """The namespaces that are not of other labs, and the links of this one."""
    spaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout.split("\n")
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return sorted(line.split()[0] for line in spaces if line), [x.split()[1] for x in links.splitlines()]


@pytest.fixture
def nothing_left():
    before = snapshot()
    yield
    assert snapshot() == before
