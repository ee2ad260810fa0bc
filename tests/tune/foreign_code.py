"""The packages that exports are for, installed by pip without dependencies into folders of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = {
    "megatron-lm": "megatron-core==0.19.2 triton packaging",
    "maxtext": "--ignore-requires-python maxtext==0.2.5 omegaconf antlr4-python3-runtime==4.9.3 flax msgpack "
    "etils importlib_resources zipp nest_asyncio orbax-checkpoint orbax-export tensorstore aiofiles humanize "
    "simplejson pathwaysutils fastapi starlette opentelemetry-api opentelemetry-sdk "
    "opentelemetry-semantic-conventions uvicorn",
    "torchtitan": "torchtitan==0.3.0 tyro typeguard docstring_parser torchdata datasets dill xxhash multiprocess "
    "pyarrow pandas einops spmd_types torch_checkpointing triton",
    "deepspeed": "deepspeed==0.19.8 hjson py-cpuinfo msgpack ninja einops",
    "axolotl": "axolotl==0.19.0 addict",
    "megatron-bridge": "megatron-bridge==0.3.1 megatron-core==0.16.1 omegaconf hydra-core "
    "antlr4-python3-runtime==4.9.3",
}
"""What pip installs for a target: the package in a fixed version, and those that its code imports."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def python_for(target: str) -> str:
    """An interpreter that the target's code is written for."""
    if target != "megatron-lm" or sys.version_info >= (3, 12):
        return sys.executable
    if "EXPORT_PYTHON" not in os.environ:
        pytest.skip("Megatron-LM needs Python 3.12; EXPORT_PYTHON may name one that has torch")
    return os.environ["EXPORT_PYTHON"]


def install(target: str, python: str, folder: Path) -> None:
    """Fill an empty folder with the packages of a target; skip the test where pip has no index to ask."""
    if target not in PACKAGES or any(folder.iterdir()):
        return
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    installed = subprocess.run(
        [*command, "--no-build-isolation", *PACKAGES[target].split()], capture_output=True, text=True,
        check=False, env=os.environ | {"DS_BUILD_OPS": "0"},
    )  # fmt: skip
    if installed.returncode:
        pytest.skip(f"pip could not install {target}: {installed.stderr.strip().splitlines()[-1]}")
