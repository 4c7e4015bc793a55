#!/usr/bin/env bash
# The CPU half under AddressSanitizer with UndefinedBehaviorSanitizer, then under ThreadSanitizer: builds tests/cpp once
# for each in build/, runs it, and fails on any report. Needs a C++ compiler with its sanitizer libraries, cmake and ninja.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${SANITIZER_BUILD_DIR:-build/sanitize}

# ThreadSanitizer maps its shadow at fixed addresses, which a kernel that randomises many bits of the address space may
# have taken. Without randomisation it always fits; where a container forbids turning it off, it is tried as it is.
fixed_addresses=()
if setarch "$(uname -m)" --addr-no-randomize true 2>/dev/null; then
  fixed_addresses=(setarch "$(uname -m)" --addr-no-randomize)
fi

build_test() {
  local sanitizer=$1
  echo "== $sanitizer"
  cmake -G Ninja -S . -B "$build/${sanitizer//,/-}" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMEGASETUP_PYTHON=OFF \
    -DMEGASETUP_TESTS=ON "-DMEGASETUP_SANITIZER=$sanitizer" >/dev/null
  cmake --build "$build/${sanitizer//,/-}"
}

# An undefined operation is only a message unless it is told to end the run.
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export ASAN_OPTIONS=detect_stack_use_after_return=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
build_test address,undefined
"$build/address-undefined/cpu_test"
build_test thread
# ThreadSanitizer does not support threads in a forked child.
"${fixed_addresses[@]}" "$build/thread/cpu_test" --no-fork
