"""A release is built and works on each Python that is here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_a_release_is_built_and_installed_on_each_python(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "release.sh"), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "installed, trained and read its LoRA" in done.stdout
    assert len(list(tmp_path.glob("flame_train-*"))) == 2
