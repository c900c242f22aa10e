#!/usr/bin/env bash
# Runs the tests in which kernels compute as C++ under the address and undefined behaviour sanitizers: an access beyond an
# array ends the test. Takes some ten minutes; `scripts/sanitize_kernels.sh -k name` passes arguments on to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

# Coroutines switch stacks, so what lies on these is not watched. Python frees nothing at its end.
export KERNEL_FLAGS="-g -fsanitize=address,undefined -fno-sanitize-recover=all --param asan-stack=0"
export ASAN_OPTIONS="detect_leaks=0:detect_stack_use_after_return=0"
export LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)"
tests=tests/engine/backend
.venv/bin/python -m pytest -q -o timeout=3000 $tests/test_generated.py $tests/test_written_out.py \
  $tests/test_row_sums.py $tests/test_random_kernels.py $tests/test_scalars.py \
  $tests/test_update_kernels.py $tests/test_scans_and_extremes.py $tests/test_dropout_kernel.py \
  $tests/test_radix_sort.py "$@"
