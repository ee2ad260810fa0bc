"""Files that start exported steps: shells run them as written, with what would train replaced by a recorder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from test_exports import plan_of
from typer.testing import CliRunner

from meshweave.base.errors import MeshweaveError, UnsupportedError
from meshweave.cli.app import app
from meshweave.describe.machine.cluster import load_cluster
from meshweave.tune.exports import LAUNCHERS, TARGETS, export, launch_file

RECORDER = """import json, os, sys
with open(os.environ["RECORD"] + "." + os.environ.get("HOST", "0"), "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""
PLAIN = {"pipeline": 1, "data": 4, "zero": 2, "tensor": 1}


def commands(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """An environment whose commands of these names record their arguments."""
    for name in names:
        (folder / name).write_text(f"#!{sys.executable}\n{RECORDER}")
        (folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(folder / "record")}


def recorded(folder: Path) -> list[list[str]]:
    return [
        json.loads(line) for path in sorted(folder.glob("record.*")) for line in path.read_text().splitlines()
    ]


@pytest.mark.parametrize("target", ["megatron-lm", "megatron-bridge", "torchtitan", "deepspeed"])
def test_a_shell_gives_torchrun_the_ranks_and_the_settings(target: str, tmp_path: Path) -> None:
    made = export(plan_of(PLAIN), target)
    script = launch_file(made, "torchrun", load_cluster("dgx-h100:16"))
    environment = commands(tmp_path, ("torchrun",)) | {
        "MASTER": "h0",
        "HOST_NUMBER": "1",
        "TRAIN": "train.py --x 1",
    }
    subprocess.run(["bash", "-c", script], check=True, env=environment, cwd=tmp_path)
    (words,) = recorded(tmp_path)
    assert words[:4] == ["--nnodes", "2", "--nproc-per-node", "8"]
    assert words[words.index("--rdzv-endpoint") + 1] == "h0:29500"
    own = words[words.index("train.py") :]
    if target == "deepspeed":
        assert own == ["train.py", "--x", "1", "--deepspeed", "deepspeed.json"]
        assert json.loads((tmp_path / "deepspeed.json").read_text()) == made.settings
    else:
        assert own[3:] == made.text.replace("\\\n", " ").split()


def test_without_what_trains_a_shell_says_so(tmp_path: Path) -> None:
    script = launch_file(export(plan_of(PLAIN), "torchtitan"), "torchrun", load_cluster("dgx-h100:8"))
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode != 0 and "TRAIN: set it to the training script" in result.stderr


def test_slurm_gives_each_host_the_same_lines(tmp_path: Path) -> None:
    made = export(plan_of(PLAIN), "accelerate")
    script = launch_file(made, "slurm", load_cluster("dgx-h100:16"))
    environment = commands(tmp_path, ("accelerate",))
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho h0; echo h1\n")
    (tmp_path / "srun").write_text(
        '#!/bin/bash\nshift\nfor n in 0 1; do SLURM_NODEID=$n HOST=$n "$@" || exit 1; done\n'
    )
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    environment |= {"SLURM_JOB_NODELIST": "h[0-1]", "SLURM_JOB_ID": "7", "TRAIN": "train.py"}
    subprocess.run(["bash", "-c", script], check=True, env=environment, cwd=tmp_path)
    first, second = recorded(tmp_path)
    assert (
        first[first.index("--machine_rank") + 1] == "0" and second[second.index("--machine_rank") + 1] == "1"
    )
    assert first[first.index("--main_process_ip") + 1] == "h0" and first[-1] == "train.py"
    assert "#SBATCH --nodes=2" in script and "#SBATCH --gpus-per-node=8" in script


def test_a_job_set_has_a_pod_for_each_host() -> None:
    manifest = json.loads(launch_file(export(plan_of(PLAIN), "torchtitan"), "jobset", load_cluster("p5:32")))
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 4
    container = job["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert subprocess.run(["bash", "-n", "-c", container["command"][2]], check=False).returncode == 0


@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("launcher", sorted(LAUNCHERS))
def test_every_target_is_started_or_refused_by_name(target: str, launcher: str) -> None:
    made = export(plan_of(PLAIN), target)
    try:
        text = launch_file(made, launcher, load_cluster("dgx-h100:16"))
    except MeshweaveError as error:
        assert target in str(error)
    else:
        assert "torchrun" in text or "accelerate launch" in text


def test_what_has_no_hosts_is_refused() -> None:
    made = export(plan_of(PLAIN), "torchtitan")
    with pytest.raises(UnsupportedError, match=r"the hosts of .* are not described"):
        launch_file(made, "slurm", load_cluster("tpu-v4-pod:16"))
    with pytest.raises(UnsupportedError, match=r"no launcher 'slrm' \(did you mean 'slurm'\?\)"):
        launch_file(made, "slrm", load_cluster("dgx-h100:16"))


def test_the_verb_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_of({}).save(path)
    result = CliRunner().invoke(
        app, ["export", str(path), "--to", "torchtitan", "--launch", "slurm", "--json"]
    )
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)
    assert table["launch"].startswith("#!/bin/bash\n#SBATCH")
    assert table["settings"] == json.loads(json.dumps(asdict(export(plan_of({}), "torchtitan"))))["settings"]
