#!/usr/bin/env bash
# Installs the project with what its tests need, then runs every check. `scripts/test.sh -k name` passes
# arguments on to pytest. The end says which tests were skipped and why; scripts/test_gpu.sh runs those for a GPU. PYTHON chooses the interpreter for a new .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
.venv/bin/python -m pip install --quiet --editable '.[dev,parity,docs]'

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/mypy --platform win32 --cache-dir .mypy_cache/win32
.venv/bin/lint-imports --no-logo
# The same drawn examples each time: whether a commit passes depends on the commit. `pytest` by itself draws others.
# Long proofs are for a release: `scripts/test.sh -m proof`.
.venv/bin/pytest -n 2 --hypothesis-profile=ci -m "not proof" "$@"
