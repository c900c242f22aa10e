#!/usr/bin/env bash
# Installs the project with what its tests need, then runs every check. `scripts/test.sh -k name` passes
# arguments on to pytest. The end says which tests were skipped and why; scripts/test_gpu.sh runs those for a GPU. PYTHON chooses the interpreter for a new .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ ! -x .venv/bin/python ]; then
  "${PYTHON:-python3}" -m venv .venv
  .venv/bin/python -m pip install --quiet --upgrade pip  # a Python's own may take a minute longer to choose versions
fi
# Python compiles the few modules that tests import; pip would compile all of every package.
.venv/bin/python -m pip install --quiet --no-compile --editable '.[dev,parity,docs]'

.venv/bin/ruff check .
.venv/bin/ruff format --check .
# Beside each other, each with a cache of its own.
.venv/bin/mypy &
posix=$!
.venv/bin/mypy --platform win32 --cache-dir .mypy_cache/win32 &
windows=$!
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
wait "$posix"
wait "$windows"
.venv/bin/lint-imports --no-logo

# Tests write gigabytes, and the program syncs every file of a run: in memory, where there is room, that takes no time.
if [ -z "${TMPDIR:-}" ] && [ "$(df -Pm /dev/shm 2>/dev/null | awk 'END { print $4 + 0 }')" -gt 8000 ]; then
  TMPDIR=$(mktemp -d /dev/shm/flame-train-tests-XXXXXX)
  export TMPDIR
  trap 'rm -rf "$TMPDIR"' EXIT
fi
# The same drawn examples each time: whether a commit passes depends on the commit. `pytest` by itself draws others.
# Long proofs are for a release: `scripts/test.sh -m proof`. A worker takes neighbours, which share what is made once.
.venv/bin/pytest -n 2 --dist worksteal --hypothesis-profile=ci -m "not proof" "$@"
# The last digits of a product depend on OpenBLAS's kernels. What is promised about bytes holds under others too.
if [ $# -eq 0 ] && [ "$(uname -m)" = x86_64 ]; then
  kernels=$(.venv/bin/python -c '
import numpy, threadpoolctl
own = {info.get("architecture") for info in threadpoolctl.threadpool_info()}
print("Nehalem" if own & {"Haswell", "Zen"} else "Haswell")')
  echo "tests of bytes once more, with OpenBLAS's kernels for $kernels"
  OPENBLAS_CORETYPE=$kernels .venv/bin/pytest -q -n 2 --dist worksteal --hypothesis-profile=ci -m "bytes and not proof"
fi
