"""The examples learn what they say they learn."""

from __future__ import annotations

import gzip
import importlib.util
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_is_short_enough_to_read() -> None:
    lengths = {p.name: len(p.read_text().splitlines()) for p in EXAMPLES.glob("*.py")}
    assert len(lengths) == 4
    assert max(lengths.values()) < 120


def test_mlp_tells_spirals_apart() -> None:
    losses, right = example("mlp").train(steps=500, verbose=False)
    assert np.mean(losses[-50:]) < 0.1 * np.mean(losses[:50])
    assert right > 0.97


def test_cnn_reads_handwritten_digits() -> None:
    cnn = example("digits_cnn")
    assert cnn.train(*cnn.sklearn_digits(), epochs=6, verbose=False) > 0.95


def test_cnn_says_what_to_do_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match="pip install scikit-learn"):
        example("digits_cnn").sklearn_digits()


def write_idx(path: Path, array: np.ndarray, packed: bool) -> None:
    raw = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.with_name(path.name + ".gz" * packed).write_bytes(gzip.compress(raw) if packed else raw)


def test_cnn_reads_idx_files(tmp_path: Path) -> None:
    rng, cnn = np.random.default_rng(0), example("digits_cnn")
    wanted = {}
    for name, count, packed in (("train", 5, False), ("t10k", 3, True)):
        wanted[name] = rng.integers(0, 256, (count, 28, 28), np.uint8), rng.integers(0, 10, count).astype(np.uint8)
        write_idx(tmp_path / f"{name}-images-idx3-ubyte", wanted[name][0], packed)
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte", wanted[name][1], packed)
    for found, (images, digits) in zip(cnn.mnist(tmp_path), wanted.values(), strict=True):
        np.testing.assert_array_equal(np.rint(found[0][..., 0] * 255), images)
        np.testing.assert_array_equal(found[1], digits)
    with pytest.raises(SystemExit, match="it is not there"):
        cnn.mnist(tmp_path / "nowhere")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[:10],
        lambda raw: b"",
        lambda raw: raw + b"0",
        lambda raw: b"<html>" + raw,
        lambda raw: raw[:40] + b"00" + raw[42:-12],
    ],
)
def test_cnn_names_a_damaged_file(damage: Callable[[bytes], bytes], packed: bool, tmp_path: Path) -> None:
    for name in ("train", "t10k"):
        write_idx(tmp_path / f"{name}-images-idx3-ubyte", np.ones((3, 28, 28), np.uint8), packed)
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte", np.ones(3, np.uint8), packed)
    path = tmp_path / ("t10k-images-idx3-ubyte" + ".gz" * packed)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SystemExit, match=f"{path.name}: damaged"):
        example("digits_cnn").mnist(tmp_path)


def test_cnn_refuses_more_digits_than_images(tmp_path: Path) -> None:
    for name in ("train", "t10k"):
        write_idx(tmp_path / f"{name}-images-idx3-ubyte", np.ones((3, 28, 28), np.uint8), False)
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte", np.ones(4, np.uint8), False)
    with pytest.raises(SystemExit, match="3 images and 4 digits"):
        example("digits_cnn").mnist(tmp_path)


@pytest.mark.parametrize("name", ["mlp", "digits_cnn", "resnet_cifar"])
def test_a_device_that_is_not_there_ends_each_in_a_sentence(name: str, tmp_path: Path) -> None:
    write_cifar(tmp_path, 32)
    for part in ("train", "t10k"):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", np.ones((3, 28, 28), np.uint8), False)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", np.ones(3, np.uint8), False)
    given = {"mlp": [], "digits_cnn": ["--mnist", tmp_path], "resnet_cifar": [tmp_path]}[name]
    command = [sys.executable, EXAMPLES / f"{name}.py", "--device", "cuda", *given]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)
    assert found.returncode == 4, found.stderr
    assert "cuda" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.skipif("MNIST_DIR" not in os.environ, reason="MNIST's files are not here; MNIST_DIR names their folder")
@pytest.mark.slow
def test_cnn_reads_mnist() -> None:
    cnn = example("digits_cnn")
    assert cnn.train(*cnn.mnist(Path(os.environ["MNIST_DIR"])), epochs=4, verbose=False) > 0.99


def write_cifar(folder: Path, count: int) -> None:
    """Files of the right form with images that are easy to tell apart: each class has a colour."""
    rng = np.random.default_rng(0)
    colours = (
        np.array([[n % 2, n // 2 % 2, n // 4] for n in range(8)] + [[0.5, 1, 0.5], [0.5, 0, 0]])[..., None, None] * 255
    )
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        classes = rng.integers(0, 10, count)
        pixels = np.clip(colours[classes] + rng.normal(0, 25, (count, 3, 32, 32)), 0, 255).astype(np.uint8)
        np.concatenate([classes[:, None].astype(np.uint8), pixels.reshape(count, -1)], axis=1).tofile(folder / name)


def test_resnet_learns_from_files_of_cifars_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cifar(tmp_path, 32)
    resnet = example("resnet_cifar")
    seen, unseen = resnet.cifar10(tmp_path)
    assert seen[0].shape == (160, 32, 32, 3)
    assert resnet.train(seen, unseen, resnet.ResNet(n=1, w=1), 4, "cpu", batch=32) > 0.5  # 0.1 by chance
    assert "of the unseen images right" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"data_batch_1\.bin"):
        resnet.cifar10(tmp_path / "nowhere")
    with (tmp_path / "test_batch.bin").open("ab") as file:
        file.write(b"0")
    with pytest.raises(SystemExit, match=r"test_batch\.bin: damaged"):
        resnet.cifar10(tmp_path)
    (tmp_path / "batches.meta").touch()
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(SystemExit, match="these are pickles, take the binary version"):
        resnet.cifar10(tmp_path)


def test_resnet_reads_the_folder_of_the_archive_and_refuses_other_classes(tmp_path: Path) -> None:
    inside = tmp_path / "cifar-10-batches-bin"
    inside.mkdir()
    write_cifar(inside, 3)
    resnet = example("resnet_cifar")
    (images, classes), _ = resnet.cifar10(tmp_path)
    record = np.fromfile(inside / "data_batch_1.bin", np.uint8)[:3073]
    assert classes[0] == record[0]
    assert images[0, 1, 2].tolist() == [record[1 + colour * 1024 + 34] for colour in range(3)]
    record[0] = 77
    record.tofile(inside / "test_batch.bin")
    with pytest.raises(SystemExit, match="class 77: expected 0 to 9"):
        resnet.cifar10(tmp_path)


@pytest.mark.skipif("CIFAR10_DIR" not in os.environ, reason="CIFAR-10 is not here; CIFAR10_DIR names its folder")
@pytest.mark.slow
def test_resnet_learns_cifar10() -> None:
    resnet = example("resnet_cifar")
    seen, unseen = resnet.cifar10(Path(os.environ["CIFAR10_DIR"]))
    few = seen[0][:6400], seen[1][:6400]
    assert resnet.train(few, (unseen[0][:1000], unseen[1][:1000]), resnet.ResNet(n=1, w=1), 3, "cpu") > 0.35
