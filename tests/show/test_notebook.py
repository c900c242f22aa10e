"""The notebook of the documents, run by a kernel; only its settings are others."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from flame_train.show.run_result import RunResult
from tests.tiny_sdxl import write_tiny_sdxl

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "train_a_lora.ipynb"


class Looking(nbclient.NotebookClient):  # type: ignore[misc]
    """Runs a notebook, and keeps every text that took the place of another in a cell."""

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] == "update_display_data":
            cell.setdefault("replaced", []).append(msg["content"]["data"].get("text/plain", ""))
        return super().process_message(msg, cell, cell_index)


def executed(folder: Path, checkpoint: Path, images: Path, left_out: tuple[str, ...]) -> list[Any]:
    """Runs the notebook in `folder` on the CPU, with a small base; returns its cells of code that ran."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    settings = f"""
config |= {{"model": {{"checkpoint": {str(checkpoint)!r}}}, "gradient": {{}}, "checkpoint": {{}}}}
config["data"] |= {{"path": {str(images)!r}, "resolution": 64, "bucket_step": 32}}
config["train"] = {{"steps": 2, "precision": "fp32"}}
config["sample"] |= {{"every": 2, "steps": 1}}
device = "cpu"
"""
    cells = [cell for cell in notebook.cells if not set(left_out) & set(cell.metadata.get("tags", ()))]
    for cell in cells:
        if "parameters" in cell.metadata.get("tags", ()):
            cell.source += settings
    notebook.cells = cells
    client = Looking(notebook, timeout=900, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return [cell for cell in cells if cell.cell_type == "code"]


def shown(cell: Any, kind: str) -> str:
    return "".join(out["data"].get(kind, "") for out in cell.outputs if "data" in out)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel finds this checkout, and its programs."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def result_is_shown(cells: list[Any], folder: Path) -> None:
    *_, plan, trained, published = cells
    assert "'steps': 2" in shown(plan, "text/plain")
    page = shown(trained, "text/html")
    assert "done, step 2 of 2" in page
    assert any(line.startswith("2/2 █") for line in trained["replaced"]), "no bar was shown"
    assert not any("█" in str(out) for out in trained.outputs), "the saved notebook keeps bars"
    assert page.count("data:image/") == 2  # the loss, and the last samples
    assert str(folder / "runs" / "zkfox" / "zkfox.safetensors") in page or "runs/zkfox/zkfox.safetensors" in page
    assert 'instance_prompt: "zkfox"' in "".join(out.get("text", "") for out in published.outputs)


def test_a_result_whose_folder_is_gone_is_text_and_no_script(tmp_path: Path) -> None:
    result = RunResult(log=str(tmp_path / "gone" / "log.jsonl"), lora="<script>", mean_loss=0.25, hub={"error": "a&b"})
    page = result._repr_html_()
    assert page == "<div><b>LoRA</b> &lt;script&gt;<br><b>loss</b> 0.25<br><b>published</b> a&amp;b</div>"
    assert result["lora"] == "<script>"


@pytest.mark.usefixtures("environment")
@pytest.mark.filterwarnings("ignore")  # of the kernel's libraries
def test_the_notebooks_own_run(tmp_path: Path, drawn: Path) -> None:
    write_tiny_sdxl(tmp_path / "base.safetensors")
    result_is_shown(executed(tmp_path, tmp_path / "base.safetensors", drawn, ("install", "quickstart")), tmp_path)


@pytest.mark.proof
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("environment")
@pytest.mark.filterwarnings("ignore")
def test_the_whole_notebook(tmp_path: Path) -> None:
    """Its first cell installs nothing where flame-train is there; then comes the quickstart, whose base is used."""
    demo = tmp_path / "demo"
    cells = executed(tmp_path, demo / "base.safetensors", demo / "images", ())
    assert shown(cells[1], "image/png")
    result_is_shown(cells, tmp_path)
