"""`launch_file`: what starts a step that is exported, on all hosts of its cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from meshweave.base.errors import UnsupportedError, require_known
from meshweave.describe.machine.cluster import Cluster
from meshweave.describe.machine.network import HostsNetwork
from meshweave.tune.exports.row import Export

_FILES = {
    "deepspeed": ("deepspeed.json", "--deepspeed"),
    "accelerate": ("accelerate.json", "--config_file"),
}
"""The file that holds the settings of a target, and the option that takes it."""
_STARTED_OTHERWISE = {
    "axolotl": "its settings go into a file with model and data, which `axolotl train` starts",
    "maxtext": "a TPU slice is started by its own runtime",
    "hf": "a tp_plan is Python",
}
_PORT = 29500


def launch_file(export: Export, launcher: str, cluster: Cluster) -> str:
    """Return the text of a file that starts one process a chip on all hosts of a cluster.

    What trains is $TRAIN, a script or `-m` module with the arguments of its own (its model, its data); without
    it the shell exits with a line that says so. Arguments or a file of settings of the export are added.

    Args:
        launcher: one of `LAUNCHERS`: a shell script to run on each host ("torchrun"), one for sbatch ("slurm"),
            or a manifest of a Kubernetes JobSet in JSON ("jobset"), whose image and TRAIN are to be filled in.

    Raises:
        UnsupportedError: there is no such launcher, the target of the export is not started by one (axolotl,
            maxtext and hf), or the cluster's network has no hosts.
    """
    require_known(launcher, LAUNCHERS, "there is no launcher", UnsupportedError, "there are")
    if export.target in _STARTED_OTHERWISE:
        raise UnsupportedError(f"no launch file for {export.target}: {_STARTED_OTHERWISE[export.target]}")
    return LAUNCHERS[launcher](export, cluster)


def _hosts(cluster: Cluster) -> tuple[int, int]:
    """Return the number of hosts and of chips of each. Raises UnsupportedError if they are not described."""
    if not isinstance(cluster.network, HostsNetwork):
        raise UnsupportedError(f"no launch file: the hosts of {cluster.name} are not described")
    return cluster.network.num_hosts, cluster.network.chips_per_host


def _body(export: Export, num_hosts: int, chips_per_host: int, host: str, rank: str) -> str:
    """Return the lines of shell that a host runs; `host` names the first one, `rank` is the number of this one."""
    lines = [': "${TRAIN:?set it to the training script, or -m MODULE, with its model and data}"']
    lines += [f"export {name}={value}" for name, value in export.environment.items()]
    name, option = _FILES.get(export.target, ("", ""))
    if name:
        lines += [f"cat > {name} <<'SETTINGS'", export.text, "SETTINGS"]
    endpoint = f"--rdzv-backend c10d --rdzv-endpoint {host}:{_PORT} --rdzv-id ${{RUN_ID:-meshweave}}"
    start = f"torchrun --nnodes {num_hosts} --nproc-per-node {chips_per_host} {endpoint}"
    match export.target:
        case "accelerate":
            start = (
                f"accelerate launch {option} {name} --num_machines {num_hosts} --machine_rank {rank} "
                f"--main_process_ip {host} --main_process_port {_PORT} $TRAIN"
            )
        case "deepspeed":
            start += f" $TRAIN {option} {name}"
        case _:
            start += f" $TRAIN \\\n{export.text}"
    return "\n".join([*lines, start])


def _torchrun(export: Export, cluster: Cluster) -> str:
    num_hosts, chips_per_host = _hosts(cluster)
    lines = ["#!/bin/bash", "set -eu"]
    if num_hosts > 1:
        lines += [
            ': "${MASTER:?set it to the name of the first host}"',
            ': "${HOST_NUMBER:?set it to the number of this host, from 0}"',
        ]
    host, rank = ("$MASTER", "$HOST_NUMBER") if num_hosts > 1 else ("localhost", "0")
    return "\n".join([*lines, _body(export, num_hosts, chips_per_host, host, rank)]) + "\n"


def _slurm(export: Export, cluster: Cluster) -> str:
    num_hosts, chips_per_host = _hosts(cluster)
    body = _body(export, num_hosts, chips_per_host, "$MASTER", "$SLURM_NODEID")
    return "\n".join(
        [
            "#!/bin/bash",
            "#SBATCH --job-name=meshweave",
            f"#SBATCH --nodes={num_hosts}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --gpus-per-node={chips_per_host}",
            "#SBATCH --exclusive",
            "set -eu",
            'export MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) RUN_ID=$SLURM_JOB_ID',
            "HOST=$(cat <<'HOST'",
            body,
            "HOST",
            ")",
            'srun --kill-on-bad-exit=1 bash -euc "$HOST"',
            "",
        ]
    )


def _jobset(export: Export, cluster: Cluster) -> str:
    num_hosts, chips_per_host = _hosts(cluster)
    resource = "amd.com/gpu" if cluster.chip.name.startswith("MI") else "nvidia.com/gpu"
    first = "meshweave-hosts-0-0.meshweave"
    body = _body(export, num_hosts, chips_per_host, first, "$JOB_COMPLETION_INDEX")
    container: dict[str, Any] = {
        "name": "host",
        "image": "",
        "command": ["bash", "-euc", body],
        "env": [{"name": "TRAIN", "value": ""}],
        "ports": [{"containerPort": _PORT}],
        "resources": {"limits": {resource: chips_per_host}},
    }
    pod = {"restartPolicy": "Never", "containers": [container]}
    job = {"parallelism": num_hosts, "completions": num_hosts, "backoffLimit": 0, "completionMode": "Indexed"}
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "meshweave"},
        "spec": {
            "replicatedJobs": [
                {"name": "hosts", "replicas": 1, "template": {"spec": job | {"template": {"spec": pod}}}}
            ]
        },
    }
    return json.dumps(manifest, indent=2) + "\n"


LAUNCHERS: dict[str, Callable[[Export, Cluster], str]] = {
    "torchrun": _torchrun,
    "slurm": _slurm,
    "jobset": _jobset,
}
