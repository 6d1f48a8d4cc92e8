#!/usr/bin/env bash
# On a machine with one GPU, torch and triton; needs neither SGLang nor a network. Below four minutes.
# ./benchmarks/gpu/run_all.sh            everything        (the last line is JSON; $OUT/relay_gpu.txt keeps the output)
# ./benchmarks/gpu/run_all.sh --dry-run  the same code on the CPU, kernels interpreted
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=".:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
python="${PYTHON:-python3}"
log="${OUT:-$(mktemp -d)}/relay_gpu.txt"
if [ "${1:-}" = "--dry-run" ]; then
  "$python" -m benchmarks.gpu.interpreted benchmarks.gpu.run_all "$@" 2>&1 | tee "$log"
else
  "$python" -m benchmarks.gpu.run_all "$@" 2>&1 | tee "$log"
fi
