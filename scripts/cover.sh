#!/usr/bin/env bash
# Fails if the tests that need neither a GPU nor PyTorch run less than 95 % of the engine's lines. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

.venv/bin/pytest -n 2 -m "not parity and not gpu" tests/engine tests/models tests/adapters tests/diffusion tests/training \
  --cov=flame_train.engine --cov-report=term-missing:skip-covered --cov-fail-under=95 "$@"
