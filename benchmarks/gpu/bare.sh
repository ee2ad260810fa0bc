#!/usr/bin/env bash
# Installs the three packages on a machine that has torch, Triton and build tools (scikit-build-core, nanobind, cmake,
# ninja, a C++ compiler) but no network, and runs stages there. Before: make gpu-wheels, and copy .whl along.
#
#     bash benchmarks/gpu/bare.sh tests,tracked [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/../.."
site=$(mktemp -d)
pip="python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target $site"
[ ! -d .whl ] || $pip .whl/*.whl
$pip --no-build-isolation . ./lab ./studies
PYTHONPATH=$site exec python3 benchmarks/gpu/run.py --stage "$1" --folder "${2:-benchmarks/results/gpu}"
