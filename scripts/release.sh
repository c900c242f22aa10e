#!/usr/bin/env bash
# Builds the sdist and the wheel, and tries the wheel on each Python from 3.11 to 3.14 that is found here. docs/releases.md
# says what comes before and after. `scripts/release.sh DIR` puts both files into DIR; the default is dist/.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:-dist}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python=${PYTHON:-python3}
"$python" -m venv "$work/build"
"$work/build/bin/pip" install --quiet build
"$work/build/bin/python" -m build --outdir "$work/made" .  # the wheel is built from the sdist
wheel=$(echo "$work"/made/*.whl)
"$work/build/bin/python" - "$wheel" <<'EOF'
import sys
import zipfile

# What a user's first commands need beside the code: a wheel without it installs, and then fails.
names = zipfile.ZipFile(sys.argv[1]).namelist()
for needed in ("small_sdxl.safetensors", "presets/style.toml", ".cu", ".cuh", "py.typed"):
    assert any(name.endswith(needed) for name in names), f"the wheel lacks {needed}"
for foreign in ("tests/", "scripts/", "docs/"):
    assert not any(name.startswith(foreign) for name in names), f"the wheel holds {foreign}"
EOF

# A Python of this version that runs: pyenv's shims are there for versions that are not.
interpreter() {
  local candidate
  for candidate in "python$1" "$HOME"/.pyenv/versions/"$1".*/bin/python "${PYENV_ROOT:-/nowhere}"/versions/"$1".*/bin/python; do
    if "$candidate" -c "import sys; assert sys.version_info[:2] == (${1/./, })" 2> /dev/null; then
      echo "$candidate"
      return
    fi
  done
}

tried=0
for version in 3.11 3.12 3.13 3.14; do
  found=$(interpreter "$version")
  if [ -z "$found" ]; then
    echo "Python $version: not here, not tried"
    continue
  fi
  "$found" -m venv "$work/$version" > /dev/null
  "$work/$version/bin/pip" install --quiet "$wheel"
  (
    cd "$work" # not the repository: the installed package is what is tried
    export PATH="$work/$version/bin:$PATH" CUDA_VISIBLE_DEVICES=
    flame-train --version
    flame-train doctor --device cpu > /dev/null
    flame-train quickstart "$work/quickstart-$version" --family flux --device cpu > "$work/quickstart-$version.txt" 2>&1 ||
      { cat "$work/quickstart-$version.txt"; exit 1; }
    flame-train inspect "$work/quickstart-$version/run/lora.safetensors" > /dev/null
    flame-train init sdxl --preset style --card 24 > /dev/null
  )
  echo "Python $version: installed, trained and read its LoRA"
  tried=$((tried + 1))
done
[ "$tried" -gt 0 ] || { echo "no Python from 3.11 to 3.14 here" >&2; exit 1; }

cp "$work"/made/* "$out"
(cd "$out" && sha256sum -- *.whl *.tar.gz)
