"""Images that were decoded before are not decoded again; whatever is wrong with others is seen all the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flame_train.data import images
from flame_train.data.dataset import Dataset, DatasetError
from flame_train.data.images import decoded_images, remember


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four images with captions, one of them turned by its EXIF."""
    made = tmp_path / "images"
    made.mkdir()
    rng = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    for i in range(4):
        image = Image.fromarray(rng.integers(0, 256, (16 + i, 24, 3), dtype=np.uint8))
        image.save(made / f"{i}.png", **({"exif": exif} if i == 1 else {}))
        (made / f"{i}.txt").write_text("an image")
    return made


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is decoded, in some order."""
    names: list[str] = []
    usual = images._decode

    def noted(data, found, label, *rest):
        names.append(label)
        return usual(data, found, label, *rest)

    monkeypatch.setattr(images, "_decode", noted)
    return names


def scan(folder: Path, cache: Path) -> Dataset:
    found = Dataset.scan(folder, seen=decoded_images(cache))
    remember(cache, {item.sha256: item.size for item in found.items if item.plain})
    return found


def test_a_second_scan_decodes_nothing_and_finds_the_same(folder: Path, tmp_path: Path, decoded: list[str]) -> None:
    first = scan(folder, tmp_path)
    assert len(decoded) == 4
    decoded.clear()
    assert scan(folder, tmp_path) == first
    assert decoded == []
    assert first.items[1].size == (24, 17)  # upright


def test_other_bytes_are_another_image(folder: Path, tmp_path: Path, decoded: list[str]) -> None:
    scan(folder, tmp_path)
    decoded.clear()
    shutil.copy(folder / "2.png", folder / "0.png")
    (folder / "3.png").write_bytes((folder / "3.png").read_bytes()[:-20])
    with pytest.raises(DatasetError, match=r"3\.png: .*cut off|3\.png"):
        scan(folder, tmp_path)
    assert "0.png" not in decoded  # it is image 2 now


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"\0" * 99, b"[" * 100_000, b"0" * 64 + b"\n{}"],
    ids=["none", "object", "null", "deep", "hash"],
)
def test_a_file_that_is_damaged_says_nothing(folder: Path, tmp_path: Path, decoded: list[str], text: bytes) -> None:
    scan(folder, tmp_path)
    (tmp_path / "images.json").write_bytes(text)
    decoded.clear()
    scan(folder, tmp_path)
    assert len(decoded) == 4
    assert len(decoded_images(tmp_path)) == 4


def test_any_changed_byte_is_seen(folder: Path, tmp_path: Path) -> None:
    """A size that is another number would put an image into another bucket."""
    scan(folder, tmp_path)
    raw = (tmp_path / "images.json").read_bytes()
    for place in range(0, len(raw), 7):
        (tmp_path / "images.json").write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        assert decoded_images(tmp_path) == {}


def test_what_other_decoders_saw_says_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan(folder, tmp_path)
    monkeypatch.setattr("flame_train.data.images._DECODERS", "of tomorrow")
    assert decoded_images(tmp_path) == {}


def test_datasets_that_share_a_cache_add_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(tmp_path, {"a": (8, 8)})
    remember(tmp_path, {"b": (9, 9)})
    assert decoded_images(tmp_path) == {"a": (8, 8), "b": (9, 9)}
    before = (tmp_path / "images.json").stat().st_mtime_ns
    remember(tmp_path, {"b": (9, 9)})
    assert (tmp_path / "images.json").stat().st_mtime_ns == before
    monkeypatch.setattr("flame_train.data.images._MOST", 2)
    remember(tmp_path, {"c": (7, 7)})
    assert decoded_images(tmp_path) == {"c": (7, 7)}


def test_without_a_folder_or_room_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(tmp_path / "absent", {"a": (8, 8)})
    assert not (tmp_path / "absent").exists()
    monkeypatch.setattr("flame_train.disk.atomic_write.free_bytes", lambda path: 0)
    remember(tmp_path, {"a": (8, 8)})
    assert json.dumps(decoded_images(tmp_path)) == "{}"
