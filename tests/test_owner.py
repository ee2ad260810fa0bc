"""Temporary folders: what a killed process left is removed by the next, and nothing else."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from meshweave.base.owner import Owner, remove_leftover_folders, temporary_folder

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="tells owners by /proc")


@pytest.fixture(autouse=True)
def folder_of_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_private_and_ends_with_its_block(tmp_path):
    with temporary_folder("launch") as folder:
        assert Path(folder).parent == tmp_path
        assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_the_next_folder_removes_what_a_killed_process_left(tmp_path):
    script = (
        "import os, signal; from meshweave.base.owner import temporary_folder\n"
        "with temporary_folder('launch') as folder:\n"
        "    open(folder + '/job.json', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    (left,) = tmp_path.iterdir()
    with temporary_folder("verify"):
        assert not left.exists()


def test_what_may_still_be_used_and_what_others_own_stays(tmp_path, monkeypatch):
    here = Owner.current()
    kept = [
        f"meshweave-launch-{here}-abc",  # of a process that runs
        f"meshweave-launch-{here.pid_space}0-1-1-abc",  # of another container
        "meshweave-launch-abc",
        f"meshweave-{here.pid_space}-1-1-0-fabric",  # no folder of ours: so are namespaces called
    ]
    gone = f"meshweave-pace-{here.pid_space}-{here.pid}-{here.start + 1}-a_b8"  # whose pid is ours now
    for name in (*kept, gone):
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"meshweave-lab-{here.pid_space}-{here.pid}-1-x").symlink_to(tmp_path / "elsewhere")
    assert remove_leftover_folders() == [str(tmp_path / gone)]
    (tmp_path / gone).mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert remove_leftover_folders() == []
