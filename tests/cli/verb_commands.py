"""Good command lines of every verb, and odd values for their options, found in what the commands declare.

In a command `{cluster}` and kin stand for a file of a kind that `sweep.kinds` has.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

from file_mutations import NUMBERS, STRINGS

from meshweave.cli.app import _command
from meshweave.tune.exports import TARGETS

_MNK = "--m 64 --n 64 --k 64"
COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": (
        "plan {model} --cluster {cluster}:4 --batch 4 --sequence 64 --products --algorithms collective,meshslice",
        "plan {model} --cluster {cluster} --batch 4 --sequence 64 --products",
        "plan {model} --cluster {cluster} --batch 4 --sequence 64 --fix tp=2",
        "plan {config} --cluster {cluster} --batch 4 --sequence 64 --fix dp=4",
        "plan {config} --cluster dgx-b200:4 --batch 4 --sequence 64 --stack ideal --precision mxfp8 --fix dp=4",
        "plan {experts} --cluster dgx-h100:8 --batch 8 --sequence 64 --fix tp=2,ep=2,etp=2",
        "plan {experts} --cluster {cluster} --batch 4 --sequence 64 --fix ep=2 --stack ideal",
        "plan {experts} --cluster dgx-h100:8 --batch 8 --sequence 64 --fix ep=8 --precision fp8-block",
        "plan {experts} --cluster tpu-v4-pod:4 --batch 4 --sequence 64 --fix dp=4,pp=1 --stack ideal --table",
    ),
    "support": ("support {model} {cluster}:4", "support {config} dgx-b200:4 --sequence 4096 --json"),
    "export": tuple(f"export {{step}} --to {name}" for name in TARGETS),
    "simulate": (
        *("simulate {program} --cluster {cluster}", "simulate {program} --cluster dgx-h100 --lower rings"),
        *(
            "simulate {plan} --cluster {cluster} --layer out",
            "simulate {plan} --cluster {cluster} --pass forward",
        ),
        *("simulate {step}", "simulate {step} --against estimate", "simulate t3_ring --cluster t3-8 --fast"),
        *(
            "simulate experts_hierarchical --cluster {cluster}",
            "simulate experts_fused --cluster dgx-h100 --set top_k=1",
        ),
    ),
    "reshard": (
        "reshard {model} --from 2x2 --to 1x4 --cluster p3.8xlarge",
        "reshard --from '2x2 S0R' --to '1x2 RS1' --shape 64,64 --cluster {cluster} --at 0 --to-at 2",
    ),
    "pipeline": (
        *("pipeline {schedule} --transfer 1ms --json", "pipeline {schedule} --report page.html"),
        *("pipeline 1f1b --cluster {cluster} --json", "pipeline {schedule} --beside eager-1f1b"),
    ),
    "run": ("run {plan} --layer out --max-dim 64", "run {plan} --layer out --max-dim 64 --machine {cluster}"),
    "verify": ("verify {plan} --ranks 2 --algorithm collective --layer out --max-dim 16",),
    "show": (
        *("show {program}", "show {program} --no-check", "show {program} --expand", "show {program} --json"),
        *("show {program} --rings 2", "show {program} --rank 3 --no-check", "show {program} --as jax"),
    ),
    "simulate-gpu": ("simulate-gpu {program} --cluster t3-8", "simulate-gpu t3_ring --cluster {cluster}"),
    "compile": ("compile {plan} --layer out", "compile {plan} --emission all --text x.txt"),
    "cluster new": ("cluster new --chip h100 --hosts 2 --nic 400Gb", "cluster new --chip mi300x --json"),
    "catalog": (
        "catalog",
        "catalog models gpt3",
        "catalog clusters dgx-h100 --toml",
        "catalog kernels",
        "catalog models deepseek-v3 --toml",
    ),
    "calibrate": (
        *("calibrate --lab {lab} --out x.toml", "calibrate --ranks 2 --out x.toml"),
        *("calibrate --device cpu --out x.toml", "calibrate --device tpu-v4 --out x.toml"),
    ),
    "tune layouts": (f"tune layouts {_MNK} --cluster {{cluster}}:4",),
    "tune schedule": (f"tune schedule {_MNK} --cluster {{cluster}} --kind direct,greedy",),
    "tune block": ("tune block {model} --cluster {cluster} --batch 4 --sequence 64 --simulate 1",),
    "tune mesh": ("tune mesh {matrix} --model {model}", "tune mesh {cluster} --model {model}"),
    "tune algorithm": ("tune algorithm meshslice --cluster {cluster}", "tune algorithm 1f1b"),
    "lab run": ("lab run {lab} -- true",),
    "lab check": ("lab check {lab}", "lab check {lab} --measure"),
    "lab clean": ("lab clean",),
    "bench matmul": ("bench matmul --lab {lab}", "bench matmul --lab {lab} --cluster {cluster} --svg x.svg"),
    "bench shapes": ("bench shapes --labs {lab},{lab}",),
    "bench fidelity": ("bench fidelity --lab {lab} --cluster {cluster}",),
    "bench fused": ("bench fused --lab {lab}",),
    "reproduce meshslice": (
        "reproduce meshslice --cluster {cluster} --rows flops",
        "reproduce meshslice --by estimate --figures 99",
    ),
    "reproduce slicing": ("reproduce slicing --pvc {cluster} --figures 99",),
    "reproduce alpacomm": ("reproduce alpacomm --cluster {cluster} --rows send_recv_linear --figures 99",),
    "reproduce atp": ("reproduce atp --rows table2",),
    "reproduce kernels": (
        *("reproduce kernels --cases {measured}", "reproduce kernels --cases {measured} --kernels {kernels}"),
    ),
    "reproduce nccl": ("reproduce nccl",),
    "reproduce published": ("reproduce published --cases {runs}",),
    "reproduce zero-bubble": ("reproduce zero-bubble --rows nothing",),
    "reproduce t3": ("reproduce t3 --rows nothing",),
    "reproduce all": ("reproduce all --papers nothing --out all",),
}
_WORDS = (
    *("", "x", "all", "os", "float32", "2x2", "0x4", "1x1000000", "2x2x2", "1:2:1", "1:0", ",", ",,,", "nan"),
    *(
        "collective",
        "meshslice",
        "tpu-v4-pod:4",
        "tpu-v4-pod:0",
        "nowhere/x",
        "/dev/full",
        "/dev/null",
        ".",
        "-",
    ),
    *(
        "ff1",
        "int8",
        "1ms",
        "-1ms",
        "1e400s",
        "512MiB",
        "-1GB",
        "0,1",
        "0,0",
        "=",
        "a=b",
        "tp=2",
        "m=64",
        "--",
    ),
)


def leaves(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the name and the command of every verb, those of installed packages too."""
    command = command or _command()
    if hasattr(command, "commands"):
        for name in command.list_commands(None):
            yield from leaves(command.get_command(None, name), (*path, name))
    else:
        yield " ".join(path), command


def unmutated(verb: str, command: str) -> str:
    """Return the command whose processor time those of a verb are held against: of a study all of it."""
    if verb == "reproduce all":
        return "reproduce all --out all"
    return verb if verb.startswith("reproduce ") else command


def odd_options(rng: random.Random, verb: str, given: list[str]) -> list[str]:
    """Return one to three options of a verb, mostly with odd values; those already given among them."""
    options = [param for param in dict(leaves())[verb].params if param.param_type_name == "option"]
    args: list[str] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        option = rng.choice(options)
        name = rng.choice((*option.opts, *option.secondary_opts))
        if name in ("--help", "--limits", "--no-limits"):  # the one lifts the limits
            continue
        args.append(name)
        if not option.is_flag:
            args.append(_odd_value(rng, option, given))
    return args if "--" not in given else []


def _odd_value(rng: random.Random, option: Any, given: list[str]) -> str:
    texts = (*NUMBERS, *STRINGS, *_WORDS, *given)
    if isinstance(option.default, int | float) and rng.random() < 0.7:
        texts = NUMBERS
    value = rng.choice(texts)[:100_000].replace("\\ud800", "\udcff").replace("\x00", "")
    return re.sub(r"^/(?!dev/(null|full))", "here/", value) if value not in given else value
