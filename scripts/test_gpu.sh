#!/usr/bin/env bash
# Runs the GPU tests in parts, each in a pytest process of its own: the imports of Megatron and Transformer Engine cost
# more than most tests, so a part holds the tests that share them, and a part that fails or hangs does not keep the
# others from running. A line for each part follows at the end, as benchmarks/results/gpu-tests.txt has them.
#
# Usage: scripts/test_gpu.sh [PART...]   (the package and its test requirements importable by python3)
#   PART     names from the table below; without any, all that the machine has GPUs for
#   PYTHON   the interpreter (python3)
#   LIMIT    seconds that a part may take (590)
#   LOGS     a folder for each part's whole output (a temporary one)
set -uo pipefail
cd "$(dirname "$0")/.."

# part | GPUs | what pytest is told
table='
kernels       | 1 | tests/kernels tests/test_moe_gpu.py
masters       | 1 | tests/masters/test_arena.py tests/masters/test_audit.py tests/masters/test_gpu_optimizers.py
hybrid        | 1 | tests/masters/test_hybrid_gpu.py -k "not resume"
resume        | 1 | tests/masters/test_hybrid_gpu.py -k resume
failing-run   | 1 | tests/test_failing_run.py
plan          | 1 | tests/planning
import        | 1 | tests/checkpoint
flow          | 1 | tests/model/test_setup_gpu.py
draft         | 1 | tests/model/test_draft_gpu.py tests/test_examples_draft.py
replay        | 1 | tests/model/test_router_replay_gpu.py
logprobs      | 1 | tests/model/test_linear_logprobs.py tests/model/test_linear_logprobs_main_grad.py
optional      | 1 | tests/model/test_optional_flows_gpu.py
examples      | 1 | tests/test_examples_train.py
cli           | 1 | tests/cli
two-masters   | 2 | tests/masters/test_two_gpus.py tests/masters/test_arena.py tests/kernels tests/test_moe_gpu.py
two-resume    | 2 | tests/masters/test_hybrid_gpu.py
two-flow      | 2 | tests/model/test_setup_two_gpus.py
two-import    | 2 | tests/checkpoint tests/planning
two-optional  | 2 | tests/model/test_draft_gpu.py tests/model/test_router_replay_gpu.py tests/model/test_linear_logprobs.py
two-cli       | 2 | tests/cli tests/test_examples_train.py
'
python=${PYTHON:-python3}
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
logs=${LOGS:-$(mktemp -d)}
mkdir -p "$logs"

failed=0 summary='' left=" $* "
while IFS='|' read -r part needs arguments; do
  part=${part// /}
  [[ -n $part ]] || continue
  [[ $# == 0 || $left == *" $part "* ]] || continue
  left=${left/ $part / }
  if (( gpus < needs )); then
    summary+="$part: skipped, needs $((needs)) GPU(s), found $gpus"$'\n'
    (( $# == 0 )) || failed=1
    continue
  fi
  marks='gpu and not multigpu'
  (( needs == 1 )) || marks=multigpu
  echo "== $part"
  eval "arguments=($arguments)"
  # shellcheck disable=SC2154  # (assigned by eval)
  timeout -k 10 "${LIMIT:-590}" "$python" -m pytest -m "$marks" --tb=short --durations=5 "${arguments[@]}" 2>&1 </dev/null | tee "$logs/$part.log"
  status=${PIPESTATUS[0]}
  closing=$(grep -E '^=+ .*(passed|failed|error|no tests ran|skipped|deselected).* =+$' "$logs/$part.log" | tail -1 | tr -d '=')
  (( status != 124 && status != 137 )) || closing+=' (cut at its limit)'
  (( status == 0 )) || failed=1
  summary+="$part:${closing:- no closing line, exit status $status}"$'\n'
done <<< "$table"

echo "== parts"
printf '%s' "$summary"
if [[ -n ${left// /} ]]; then
  echo "no such part:$left" >&2
  failed=1
fi
exit "$failed"
