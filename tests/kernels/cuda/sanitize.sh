#!/usr/bin/env bash
# Runs a small table of products under compute-sanitizer; fails on any finding in our kernels.
# PARTS="rounded tiles" takes only these parts of it.
# usage: PYTHONPATH=src tests/kernels/cuda/sanitize.sh [memcheck racecheck ...]
set -euo pipefail
cd "$(dirname "$0")"
export XLA_PYTHON_CLIENT_PREALLOCATE=false
# Plain launches, so that every kernel is checked by itself. XLA does not try kernels of its own for the products behind
# a decoded matrix: compute-sanitizer does not survive some of them.
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
if [ $# -eq 0 ]; then set -- memcheck racecheck; fi
check() {
  compute-sanitizer --tool "$1" --error-exitcode 1 --kernel-name kernel_substring=eformer "${PYTHON:-python3}" sanitize.py ${PARTS:-}
}
for tool in "$@"; do
  echo "== $tool"
  # The tool itself sometimes dies of a segmentation fault (139) while JAX starts, before it has reported anything.
  for try in 1 2 3 4 5; do
    code=0
    check "$tool" || code=$?
    [ "$code" -eq 139 ] || break
    echo "compute-sanitizer crashed, try $try"
  done
  [ "$code" -eq 0 ] || exit "$code"
done
