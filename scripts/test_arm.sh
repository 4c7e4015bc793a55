#!/usr/bin/env bash
# The CPU half built for 64-bit Arm, and its test run through an emulator: the NEON kernels on any machine. Needs, on
# Debian or Ubuntu, `apt-get install g++-aarch64-linux-gnu qemu-user`, and cmake and ninja.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${ARM_BUILD_DIR:-build/arm}

for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
  if ! command -v "$tool" >/dev/null; then
    echo "$tool is missing: install g++-aarch64-linux-gnu and qemu-user" >&2
    exit 1
  fi
done
cmake -G Ninja -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux \
  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DMEGASETUP_PYTHON=OFF \
  -DMEGASETUP_TESTS=ON >/dev/null
cmake --build "$build"
qemu-aarch64 -L /usr/aarch64-linux-gnu "$build/cpu_test" --no-fork
