#!/usr/bin/env bash
# Everything that a machine with an NVIDIA GPU can check, in one command: some fifteen minutes on an H100.
#
#   scripts/test_gpu.sh [FOLDER]
#
# PYTHON names an interpreter that has flame-train with a GPU extra and `dev`; without it `.venv` is made, and EXTRA
# (cuda13 or cuda12) installed. Where torch is installed (the `parity` extra), PyTorch's own samples run on the GPU too.
# Results go to FOLDER, by default a new temporary one. All parts run, whatever one of them says; the end lists them.
set -uo pipefail
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
  PYTHON=.venv/bin/python
  [ -x "$PYTHON" ] || python3 -m venv .venv || exit 1
  "$PYTHON" -m pip install --quiet --editable ".[dev,${EXTRA:-cuda13}]" || exit 1
fi
folder="${1:-$(mktemp -d)}"
mkdir -p "$folder"
quickstart_folder="$folder/quickstart-$$"
failed=()

part() {
  local name="$1" started=$SECONDS
  shift
  if "$@" >"$folder/$name.txt" 2>&1; then
    echo "passed  $name, $((SECONDS - started)) s"
  else
    echo "FAILED  $name, $((SECONDS - started)) s; see $folder/$name.txt"
    failed+=("$name")
  fi
  tail -n 1 "$folder/$name.txt"
}

flame() { "$PYTHON" -m flame_train "$@"; }

# Its result says what was learnt: the loss on images of the new kind that it was not trained on.
quickstart() {
  local result
  result="$(flame quickstart "$@" --json --device cuda)" || return 1
  "$PYTHON" -c '
import json, sys
losses = json.load(sys.stdin)["held_out_loss"]
print("held-out loss:", json.dumps(losses))
sys.exit(losses["new"]["after"] > 0.8 * losses["new"]["before"])' <<<"$result"
}

part doctor flame doctor --device cuda
if [ ${#failed[@]} -gt 0 ]; then
  cat "$folder/doctor.txt"
  exit 4
fi
part tests "$PYTHON" -m pytest -q -n "${WORKERS:-8}" tests/gpu
part gradients flame gradcheck --device cuda
part quickstart-sdxl quickstart "$quickstart_folder"
part quickstart-sd3 quickstart "$folder/sd3-$$" --family sd3
part quickstart-flux quickstart "$folder/flux-$$" --family flux
part killed-and-continued "$PYTHON" scripts/kill_and_continue.py "$quickstart_folder" "$folder/killed-$$" --at-once 4
memory="$("$PYTHON" -c 'from flame_train.engine.backend import get_backend as g; print(g("cuda").memory().total >> 30)')"
if [ "${memory:-0}" -ge 70 ]; then
  part predicted-memory "$PYTHON" scripts/predicted_memory.py "$folder/predicted-$$" --steps
else
  echo "not run: predicted-memory, whose steps want 70 GiB; the card has ${memory:-0}"
fi

echo
sed -n "/^skipped, by reason/,/^$/p" "$folder/tests.txt"
echo "not run here: the tests that need no GPU (scripts/test.sh), and scripts/full_run.py, which wants a model's size of disk"
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
echo "all parts passed; results in $folder"
