"""What ai-toolkit's window writes into every job, of which a model reads a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.foreign.test_meaning import imported, job

ARCHITECTURES = ("sdxl", "sd3", "zimage", "flux2", "chroma", "krea2", "anima", "qwen_image", "flux")
SAVED = "      save: {save_format: diffusers}\n"
EDIT = "arch: 'krea2:o_edit', model_kwargs: {edit: true, match_target_res: "


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_guidance_is_an_input_of_flux_alone(tmp_path: Path, arch: str) -> None:
    result = imported(tmp_path, {"j.yaml": job(", bypass_guidance_embedding: true", f"arch: {arch}")})
    assert any("bypass_guidance_embedding" in line for line in result["listed"]) == (arch == "flux")


@pytest.mark.parametrize(
    ("masks", "weight"), [("mask_path: null", None), ("mask_path: masks", 0.1), ("alpha_mask: true", 0.1)]
)
def test_least_value_of_a_mask_belongs_to_masks(tmp_path: Path, masks: str, weight: float | None) -> None:
    files = {"j.yaml": job(dataset=f", mask_min_value: 0.1, {masks}")}
    assert imported(tmp_path, files)["values"].get("data.mask_weight") == weight


def test_a_lokr_is_written_for_comfyui(tmp_path: Path) -> None:
    """As ai-toolkit does, whatever the format of whole models is."""
    text = job(rest=SAVED).replace("type: lora", "type: lokr")
    result = imported(tmp_path, {"j.yaml": text})
    assert "output.format" not in result["values"]
    assert not result["listed"]


@pytest.mark.parametrize(("matches", "listed"), [("true}", 0), ("false}", 1)])
def test_edits_of_krea_2(tmp_path: Path, matches: str, listed: Any) -> None:
    """Control images are what makes one, at the resolution of their image."""
    files = {"j.yaml": job(model=EDIT + matches, dataset=", control_path: before")}
    result = imported(tmp_path, files)
    assert result["values"]["data.control"] == ["before"]
    assert len(result["listed"]) == listed


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("lodestones/Chroma/v41", "hf:lodestones/Chroma/chroma-unlocked-v41.safetensors"),
        ("lodestones/Chroma", "hf:lodestones/Chroma"),
        ("lodestones/Chroma1-HD", "hf:lodestones/Chroma1-HD"),
    ],
)
def test_versions_of_chroma(tmp_path: Path, name: str, ours: str) -> None:
    """Of the repository of all versions it takes one file (chroma_model.py:104)."""
    files = {"j.yaml": job(model="arch: chroma").replace("base.safetensors", name)}
    result = imported(tmp_path, files)
    assert result["values"]["model.checkpoint"] == ours
    assert ("chroma-unlocked-v" in result["config"]) == (name != "lodestones/Chroma1-HD")
