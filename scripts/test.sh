#!/usr/bin/env bash
# Installs the project with what its tests need, then runs every check. `scripts/test.sh -k name` passes arguments on
# to pytest. The end says which tests were skipped and why; scripts/test_gpu.sh runs those for a GPU. PYTHON chooses the
# interpreter for a new .venv. `scripts/test.sh --quick`, in a .venv that is there, takes a minute or two: form, import
# contracts, and the tests of tests/quick.txt, which notice most faults.
set -euo pipefail
cd "$(dirname "$0")/.."

quick=
if [ "${1:-}" = --quick ]; then
  quick=yes
  shift
fi
if [ -z "$quick" ]; then
  if [ ! -x .venv/bin/python ]; then
    "${PYTHON:-python3}" -m venv .venv
    .venv/bin/python -m pip install --quiet --upgrade pip  # a Python's own may take a minute longer to choose versions
  fi
  # Python compiles the few modules that tests import; pip would compile all of every package.
  .venv/bin/python -m pip install --quiet --no-compile --editable '.[dev,parity,docs]'
elif [ ! -x .venv/bin/python ]; then
  echo "expected an environment in .venv, got none; run scripts/test.sh once without --quick, which makes it" >&2
  exit 2
fi

# A worker for each core, and for each 3 GiB of memory that is free: some tests take as much.
cores=$(getconf _NPROCESSORS_ONLN)
room=$(awk '/^MemAvailable/ { print int($2 / 3145728) }' /proc/meminfo 2>/dev/null || true)
workers=$((${room:-$cores} < cores ? ${room:-$cores} : cores))
workers=$((workers > 1 ? workers : 1))
# The same drawn examples each time: whether a commit passes depends on the commit. `pytest` by itself draws others.
# A worker takes neighbours, which share what is made once.
tests=(.venv/bin/python -m pytest -n "$workers" --dist worksteal --hypothesis-profile=ci)

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/lint-imports --no-logo

# Tests write gigabytes, and the program syncs every file of a run: in memory, where there is room, that takes no time.
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "${scratch:-}"' EXIT
if [ -z "${TMPDIR:-}" ] && [ "$(df -Pm /dev/shm 2>/dev/null | awk 'END { print $4 + 0 }')" -gt 8000 ]; then
  scratch=$(mktemp -d /dev/shm/flame-train-tests-XXXXXX)
  export TMPDIR=$scratch
fi

if [ -n "$quick" ]; then
  # shellcheck disable=SC2046  # a path a line
  "${tests[@]}" -q -m "not slow and not proof and not parity and not gpu" $(grep -v '^#' tests/quick.txt) "$@"
  exit
fi

# The scripts of the pages, where there is Node.
if command -v npx >/dev/null; then
  npx --yes --package typescript@7.0.2 -- tsc -p jsconfig.json
fi
# Beside each other, each with a cache of its own.
.venv/bin/mypy &
posix=$!
.venv/bin/mypy --platform win32 --cache-dir .mypy_cache/win32 &
windows=$!
wait "$posix"
wait "$windows"

# Long proofs are for a release: `scripts/test.sh -m proof`.
"${tests[@]}" -m "not proof" "$@"
# The last digits of a product depend on OpenBLAS's kernels. What is promised about bytes holds under others too.
if [ $# -eq 0 ] && [ "$(uname -m)" = x86_64 ]; then
  kernels=$(.venv/bin/python -c '
import numpy, threadpoolctl
own = {info.get("architecture") for info in threadpoolctl.threadpool_info()}
print("Nehalem" if own & {"Haswell", "Zen"} else "Haswell")')
  echo "tests of bytes once more, with OpenBLAS's kernels for $kernels"
  # shellcheck disable=SC2046  # of all files pytest would import what they compare with
  OPENBLAS_CORETYPE=$kernels "${tests[@]}" -q -m "bytes and not proof" $(grep -rl --include='test_*.py' 'mark\.bytes' tests)
fi
