#!/usr/bin/env bash
# Runs the GPU kernels and the pipeline under compute-sanitizer's memcheck and racecheck; fails on any report.
# Usage: scripts/sanitize_gpu.sh [PYTHON]   (on a machine with a GPU, the package importable by PYTHON)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
for tool in memcheck racecheck; do
  echo "compute-sanitizer $tool"
  compute-sanitizer --tool "$tool" --error-exitcode 1 --kernel-regex kns=megasetup "${1:-python3}" "$here/exercise_gpu.py"
done
