"""`flame-train caption --tagger` with a small network in ONNX, whose values follow from the pixels it is shown."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flame_train import cli

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

SIDE = 8
TAGS = [("safe", 9), ("long_hair", 0), ("^_^", 0), ("(o)_(o)", 0), ("zk_fox", 4), ("blue_sky", 0)]


def write_tagger(
    folder: Path, tags: list[tuple[str, int]] = TAGS, shape: tuple[object, ...] = (None, SIDE, SIDE, 3)
) -> None:
    """Writes a tagger: value i is the mean of blue, green or red (i modulo 3) in 0 to 1, less 0.1 from the 4th."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = np.zeros((3, 6), np.float32)
    for i in range(6):
        weight[i % 3, i] = 1 / 255
    constants = [
        helper.make_tensor("weight", kind, weight.shape, weight.ravel()),
        helper.make_tensor("less", kind, (6,), [0, 0, 0, -0.1, -0.1, -0.1]),
    ]
    nodes = [
        helper.make_node("ReduceMean", ["image"], ["means"], axes=[1, 2], keepdims=0),
        helper.make_node("MatMul", ["means", "weight"], ["values"]),
        helper.make_node("Add", ["values", "less"], ["likely"]),
    ]
    given = helper.make_tensor_value_info("image", kind, shape)
    made = helper.make_tensor_value_info("likely", kind, (None, 6))
    graph = helper.make_graph(nodes, "tagger", [given], [made], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    folder.mkdir(exist_ok=True)
    onnx.save(model, str(folder / "model.onnx"))
    rows = "".join(f"{i},{name},{kind},1\n" for i, (name, kind) in enumerate(tags))
    (folder / "selected_tags.csv").write_text(f"tag_id,name,category,count\n{rows}", encoding="utf-8")


def run(folder: Path, tagger: Path, *options: str) -> int:
    return cli.run(["caption", str(folder), "--tagger", str(tagger), *options, "--json"])


def test_tags_are_those_of_a_bgr_image_on_white(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tagger(tmp_path / "tagger")
    images = tmp_path / "images"
    images.mkdir()
    Image.new("RGB", (20, 20), (255, 100, 0)).save(images / "red.png")  # blue 0, green 0.39, red 1
    Image.new("RGB", (20, 10), (0, 0, 255)).save(images / "wide.png")  # half of the square is white: 1, 0.5, 0.5
    Image.new("RGB", (20, 20), (0, 0, 0)).save(images / "black.png")
    assert run(images, tmp_path / "tagger") == 3
    result = json.loads(capsys.readouterr().out)
    captions = {path.stem: path.read_text(encoding="utf-8").strip() for path in images.glob("*.txt")}
    assert captions == {"red": "^_^, blue sky, long hair", "wide": "zk fox, (o)_(o), long hair, ^_^, blue sky"}
    assert (result["empty"], result["errors"]) == (
        ["black.png"],
        ["black.png: the answer is empty: ask again, or write a caption"],
    )
    assert run(images, tmp_path / "tagger", "--overwrite", "--threshold", "0.6", "--character-threshold", "0.3") == 3
    assert (images / "wide.txt").read_text(encoding="utf-8") == "zk fox, (o)_(o)\n"


def test_what_is_no_tagger_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = tmp_path / "images"
    images.mkdir()
    Image.new("RGB", (8, 8)).save(images / "one.png")
    tagger = tmp_path / "tagger"

    def refusal() -> str:
        assert run(images, tagger) == 3
        return capsys.readouterr().err

    assert "model.onnx: expected a tagger's folder" in refusal()
    write_tagger(tagger, TAGS[:4])
    assert "gives 6 values, and selected_tags.csv lists 4 tags" in refusal()
    write_tagger(tagger, shape=(None, 4, SIDE, 3))
    assert "expected an input (N, side, side, 3)" in refusal()
    (tagger / "selected_tags.csv").write_text("id,tag\n1,a\n", encoding="utf-8")
    assert "expected CSV with the columns name and category" in refusal()
    write_tagger(tagger)
    (tagger / "model.onnx").write_bytes(b"no network")
    assert "onnxruntime cannot read it" in refusal()
