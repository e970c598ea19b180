#!/usr/bin/env bash
# Runs a small table of products under compute-sanitizer; fails on any finding in our kernels.
# ROWS="0 3" takes only these rows of the table.
# usage: PYTHONPATH=src tests/quantization/gpu/sanitize.sh [memcheck racecheck ...]
set -euo pipefail
cd "$(dirname "$0")"
export XLA_PYTHON_CLIENT_PREALLOCATE=false
# Plain launches, so that every kernel is checked by itself.
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_command_buffer="
if [ $# -eq 0 ]; then set -- memcheck racecheck; fi
for tool in "$@"; do
  echo "== $tool"
  compute-sanitizer --tool "$tool" --error-exitcode 1 --kernel-name kernel_substring=eformer "${PYTHON:-python3}" sanitize.py ${ROWS:-}
done
