"""What a training adapter keeps of a small model that is distilled here, made of what that draws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.proof
@pytest.mark.timeout(7200)
def test_few_step_images_fade_to_a_mean_where_no_adapter_was_there_in_training(tmp_path: Path) -> None:
    """A distilled model decides for an image; the ordinary loss teaches it the mean of those that it may be.

    With the adapter the model predicts that mean already, on images that neither was made of. So the LoRA need not
    learn it, and images of one caption differ as before. Without it they differ less, and move further.
    """
    own = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(ROOT / "scripts/small_sdxl/few_steps.py"), str(tmp_path)], check=True, env=own)
    found = json.loads((tmp_path / "report.json").read_text())
    errors = found["velocity_errors"]
    assert np.sum(errors["with_adapter"]) < 0.8 * np.sum(errors["alone"]), errors
    away, kinds = found["distances"], ("known", "others", "stars")
    spread, moved = (
        {way: np.array([away[f"{kind}_{way}"][figure] for kind in kinds]) for way in ("with", "without")}
        for figure in ("spread", "moved")
    )
    assert (spread["with"] > spread["without"]).all(), away
    assert spread["with"].sum() > 1.1 * spread["without"].sum(), away
    assert moved["with"].sum() < moved["without"].sum(), away
