#!/usr/bin/env bash
# Prints the path of a CPython 3.12: python3.12 on PATH, else the newest one that pyenv has installed.
# A pyenv shim named python3.12 may stand on PATH and still refuse to run, so each candidate is tried.
set -euo pipefail

works() { "$1" -c 'import sys, venv; raise SystemExit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

candidates=()
if on_path=$(command -v python3.12); then candidates+=("$on_path"); fi
pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
if [[ -d $pyenv ]]; then
  while IFS= read -r version; do candidates+=("$pyenv/$version/bin/python3.12"); done \
    < <(find "$pyenv" -maxdepth 1 -name '3.12*' -printf '%f\n' | sort -rV)
fi
for candidate in "${candidates[@]}"; do
  if works "$candidate"; then
    echo "$candidate"
    exit 0
  fi
done
echo "No working Python 3.12 was found, on PATH (python3.12) or under $pyenv." >&2
echo "Install one (apt install python3.12 python3.12-venv, or pyenv install 3.12), or name it: make PYTHON=/path/to/python3.12" >&2
exit 1
