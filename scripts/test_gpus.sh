#!/usr/bin/env bash
# Everything that a machine with several NVIDIA GPUs can check beyond scripts/test_gpu.sh.
#
#   scripts/test_gpus.sh [FOLDER]
#
# PYTHON names an interpreter that has flame-train with a GPU extra, `multi`, `dev` and `parity`. RANKS says how many
# GPUs, by default 2. STEPS names the steps that are timed, ONLY the parts that run, where a machine is lent for minutes.
# TORCH= leaves PyTorch's steps out. Each part has a time limit, and its results lie in FOLDER.
# All parts run, whatever one of them says; the end lists them. The table goes to FOLDER/scaling.txt.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-.venv/bin/python}"
ranks="${RANKS:-2}"
folder="${1:-$(mktemp -d)}"
mkdir -p "$folder"
quickstart="$folder/quickstart-$$"
failed="$folder/failed-$$"
: >"$failed"

part() {
  local name="$1" limit="$2" started=$SECONDS
  shift 2
  case " ${ONLY:-$name} " in *" $name "*) ;; *) return ;; esac
  if timeout "$limit" "$@" >"$folder/$name.txt" 2>&1; then
    echo "passed  $name, $((SECONDS - started)) s"
  else
    echo "FAILED  $name, $((SECONDS - started)) s; see $folder/$name.txt"
    echo "$name" >>"$failed"
  fi
  tail -n "${LINES_SHOWN:-6}" "$folder/$name.txt"
}

launch() { "$PYTHON" -m torch.distributed.run --nproc-per-node "$ranks" "$@"; }
export -f launch
export PYTHON ranks

part quickstart 90 "$PYTHON" -m flame_train quickstart "$quickstart" --device cuda
# These do not mind each other.
part tests 120 "$PYTHON" -m pytest -q -n 4 tests/gpu/test_several_gpus_gpu.py &
part equal 150 "$PYTHON" scripts/equal_ranks.py "$quickstart" "$folder/equal-$$" --ranks "$ranks" &
# Five ways side by side, each killed twice: ten kills, each rank as often as the other.
part killed 150 "$PYTHON" scripts/kill_and_continue.py "$quickstart" "$folder/killed-$$" --ranks "$ranks" --kills 2 \
  --at-once 5 train.seed=1 train.seed=2 train.seed=3 train.seed=4 train.seed=5 &
wait
# These are timed.
# shellcheck disable=SC2086  # several words
part scaling 540 bash -c 'launch scripts/scaling.py ${TORCH---torch} --steps ${STEPS:-sdxl:1 sdxl:4 flux-dev:1 zimage:1 krea2:1}'
part streamed 120 bash -c 'launch scripts/scaling.py --checkpointing full --set model.offload=1.0 --steps flux-dev:1'
part first 300 "$PYTHON" scripts/first_start.py "$folder/first-$$" --ranks "$ranks"
part one-rank 60 "$PYTHON" scripts/scaling.py --steps sdxl:1 sdxl:4
part bf16 60 bash -c 'launch scripts/scaling.py --set gradient.all_reduce=bf16 --steps sdxl:1'

if [ -s "$failed" ]; then
  echo "failed:" $(cat "$failed")
  exit 1
fi
echo "all parts passed; results in $folder"
