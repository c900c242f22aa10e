"""A whole folder: what is found, in which order, and every problem in one report."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flame_train.data.dataset import Dataset, DatasetError
from flame_train.errors import DataError

Folder = Callable[[dict[str, tuple[int, int]]], Path]


def test_items(folder: Folder) -> None:
    root = folder({"b.png": (20, 30), "a/z.png": (40, 16), "a.png": (10, 12)})
    dataset = Dataset.scan(root, repeats=3)
    # bytes of the path: "." sorts before "/"
    assert [item.key for item in dataset.items] == ["a.png", "a/z.png", "b.png"]
    assert [item.caption for item in dataset.items] == ["caption of 2", "caption of 1", "caption of 0"]
    assert [item.size for item in dataset.items] == [(10, 12), (40, 16), (20, 30)]
    assert all(item.path.read_bytes() for item in dataset.items)
    assert dataset.repeats == 3
    assert dataset.notices == ()


def test_order_does_not_depend_on_the_disk(folder: Folder, tmp_path: Path) -> None:
    names = [f"{stem}.png" for stem in ["Z", "a", "B", "é", "e\u0301", "10", "9", "🦊", "a b", "-x", "x/y", "x-y"]]
    root = folder(dict.fromkeys(names, (16, 16)))
    first = Dataset.scan(root)
    other = tmp_path / "copied"
    shuffled = random.Random(3).sample(names, len(names))
    for name in shuffled:
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, other / name)
        shutil.copy((root / name).with_suffix(".txt"), (other / name).with_suffix(".txt"))
    second = Dataset.scan(other)
    assert [item.key for item in first.items] == sorted(names, key=os.fsencode)
    assert [item.key for item in second.items] == [item.key for item in first.items]


@pytest.mark.parametrize(
    "stem",
    [b"new\nline", "🦊".encode(), b"two  spaces ", b"not-utf8-\xff\xfe", b"-rf", b"x" * 251, b"a.b.c", b"\x1b[2J"],
)
def test_odd_names(tmp_path: Path, image: Callable[..., object], encode: Callable[..., bytes], stem: bytes) -> None:
    (tmp_path / os.fsdecode(stem + b".png")).write_bytes(encode(image(16, 16), "PNG"))
    (tmp_path / os.fsdecode(stem + b".txt")).write_text("a caption")
    (item,) = Dataset.scan(tmp_path).items
    assert os.fsencode(item.key) == stem + b".png"
    assert item.caption == "a caption"


def test_all_problems_in_one_report(folder: Folder) -> None:
    root = folder({f"{i}.png": (16, 16) for i in range(9)} | {"tiny.png": (1, 1), "long.png": (10, 8000)})
    (root / "0.png").write_bytes(b"")
    (root / "1.png").write_bytes((root / "1.png").read_bytes()[:-20])
    (root / "2.png").write_text("not an image")
    (root / "3.txt").unlink()
    (root / "4.txt").write_bytes(b"ok\nbad \xff")
    (root / "5.caption").write_text("something else")
    (root / "6.png").unlink()
    (root / "6.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    (root / "gone.png").symlink_to("nowhere.png")
    with pytest.raises(DatasetError) as caught:
        Dataset.scan(root)
    expected = {
        "0.png: the file is empty",
        "1.png: the PNG is cut short",
        "2.png: expected an image, but its content is text",
        "3.png: has no caption: write 3.txt in the same folder",
        "4.txt:2: not valid UTF-8",
        "5.png: 5.caption, 5.txt differ",
        "6.heic: expected an image, but its content is HEIC",
        "tiny.png: 1x1 pixels: its shorter side must be at least 8",
        "long.png: 8000x10 pixels: longer than 16 times",
        "gone.png: leads nowhere",
    }
    problems = caught.value.problems
    assert len(problems) == len(expected)
    for start in expected:
        assert any(problem.startswith(start) for problem in problems), start
        assert start in str(caught.value)
    assert caught.value.exit_code == 3


def test_bad_images_can_be_left_out(folder: Folder) -> None:
    root = folder({"a.png": (16, 16), "b.png": (16, 16)})
    (root / "a.png").write_bytes(b"")
    dataset = Dataset.scan(root, on_bad="skip")
    assert [item.key for item in dataset.items] == ["b.png"]
    assert any(notice.startswith("left out: a.png: the file is empty") for notice in dataset.notices)
    (root / "b.png").write_bytes(b"")
    with pytest.raises(DatasetError, match="no usable image") as caught:
        Dataset.scan(root, on_bad="skip")
    assert len(caught.value.problems) == 3


def test_links_to_images_that_are_gone_can_be_left_out_and_others_not(folder: Folder) -> None:
    root = folder({"a.png": (16, 16)})
    (root / "b.png").symlink_to("gone.png")
    dataset = Dataset.scan(root, on_bad="skip")
    assert [item.key for item in dataset.items] == ["a.png"]
    assert any(notice.startswith("left out: b.png: leads nowhere") for notice in dataset.notices)
    (root / "folder").symlink_to("gone")
    with pytest.raises(DatasetError, match="folder: leads nowhere") as caught:
        Dataset.scan(root, on_bad="skip")
    assert len(caught.value.problems) == 1


def test_no_images(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no usable image: put"):
        Dataset.scan(tmp_path)
    for name in ("scan.jp2", "scan.txt"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DatasetError, match=r"no usable image among 2 files, e\.g\. scan\.jp2: put.*\(AVIF, BMP"):
        Dataset.scan(tmp_path)
    with pytest.raises(DataError, match=r"expected a folder.*No such file"):
        Dataset.scan(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"expected a folder.*Not a directory"):
        Dataset.scan(tmp_path / "file")


def test_captions_that_lie_there_under_another_ending_are_read_and_told(folder: Folder) -> None:
    root = folder({"a.png": (16, 16)})
    (root / "a.txt").rename(root / "a.caption")
    dataset = Dataset.scan(root, caption_endings=(".txt",))
    assert dataset.items[0].caption == (root / "a.caption").read_text()
    assert dataset.notices == ("1 caption has another ending than data.caption_extension",)
    assert Dataset.scan(root, caption_endings=(".caption",)).items[0].key == "a.png"


def test_default_and_empty_captions(folder: Folder) -> None:
    root = folder({"a.png": (16, 16), "b.png": (16, 16)})
    (root / "a.txt").unlink()
    (root / "b.txt").write_text("\n")
    dataset = Dataset.scan(root, default_caption="a photo of sks dog")
    assert [item.caption for item in dataset.items] == ["a photo of sks dog", ""]
    assert dataset.notices == (
        "1 caption is empty",
        "1 image without a caption: the default one is taken",
    )
    assert Dataset.scan(root, default_caption="").notices == ("1 caption is empty",)


def test_metadata_jsonl(folder: Folder) -> None:
    root = folder({"a.png": (16, 16), "sub/b.png": (16, 16), "c.png": (16, 16)})
    (root / "a.txt").unlink()
    (root / "sub/b.txt").unlink()
    lines = [{"file_name": "sub/b.png", "text": "bee"}, {"file_name": "a.png", "caption": "ay"}]
    (root / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [item.caption for item in Dataset.scan(root).items] == ["ay", "caption of 2", "bee"]


def test_metadata_problems(folder: Folder) -> None:
    root = folder({"a.png": (16, 16), "b.png": (16, 16)})
    (root / "b.txt").unlink()
    lines = [
        {"file_name": "a.png", "text": "not what the text file says"},
        {"file_name": "missing.png", "text": "x"},
        {"file_name": "../b.png", "text": "x"},
    ]
    (root / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(DatasetError) as caught:
        Dataset.scan(root, on_bad="skip")
    starts = [problem[:40] for problem in caught.value.problems]
    assert starts[0].startswith("metadata.jsonl:3: ")
    assert starts[1].startswith("metadata.jsonl:2: there is no image mi")
    with pytest.raises(DatasetError, match=r"a\.png: a\.txt, metadata\.jsonl differ(.|\n)*b\.png: has no caption"):
        Dataset.scan(root)


@pytest.mark.parametrize(
    ("asked", "written"), [(".TXT", ".txt"), (".wd14.txt", ".wd14.txt"), (".Wd14.Txt", ".WD14.txt")]
)
def test_captions_by_any_ending(folder: Folder, asked: str, written: str) -> None:
    root = folder({"a.b.png": (16, 16), "c/d.png": (16, 16)})
    for path in root.rglob("*.txt"):
        path.rename(path.with_suffix(written))
    dataset = Dataset.scan(root, caption_endings=(asked,))
    assert [item.caption for item in dataset.items] == ["caption of 0", "caption of 1"]
    assert dataset.notices == ()


def test_upper_case_endings_and_shared_stems(folder: Folder) -> None:
    root = folder({"a.png": (16, 16)})
    (root / "a.png").rename(root / "a.PNG")
    (root / "a.txt").rename(root / "a.TXT")
    assert [item.caption for item in Dataset.scan(root).items] == ["caption of 0"]


def test_strays_are_noted_and_hidden_files_ignored(folder: Folder) -> None:
    root = folder({"a.png": (16, 16)})
    (root / "b.txt").write_text("whose?")
    (root / "notes.md").write_text("")
    (root / ".hidden.png").write_bytes(b"rubbish")
    (root / ".cache").mkdir()
    (root / ".cache" / "x.png").write_bytes(b"rubbish")
    assert Dataset.scan(root).notices == (
        "1 caption file without an image, e.g. b.txt",
        "1 other file is passed over (1 .md), e.g. notes.md",
    )


@pytest.mark.timeout(20)
def test_links_pipes_and_loops(folder: Folder, tmp_path: Path) -> None:
    root = folder({"z/a.png": (16, 16)})
    (root / "a-link").symlink_to("z")
    (root / "z" / "up").symlink_to("..")
    (root / "z" / "self").symlink_to("self")
    os.mkfifo(root / "pipe.png")
    (root / "null.png").symlink_to("/dev/null")
    outside = tmp_path / "outside"
    shutil.copytree(root / "z", outside, ignore=lambda *_: ["up", "self"])
    (root / "more").symlink_to(outside)
    with pytest.raises(DatasetError, match="z/self: leads nowhere") as caught:
        Dataset.scan(root)
    assert len(caught.value.problems) == 1
    (root / "z" / "self").unlink()
    dataset = Dataset.scan(root)
    # the real place gives the name, not the link that sorts before it
    assert [item.key for item in dataset.items] == ["more/a.png", "z/a.png"]
    for start in ("a-link: a link", "z/up: a link", "pipe.png: a named pipe", "null.png: a device"):
        assert any(notice.startswith(start) for notice in dataset.notices), start


@pytest.mark.timeout(20)
def test_many_links_to_each_other_end_soon(folder: Folder) -> None:
    root = folder({f"d{i}/a.png": (16, 16) for i in range(12)})
    for i in range(12):
        for j in range(12):
            (root / f"d{i}" / f"to{j}").symlink_to(f"../d{j}")
    assert len(Dataset.scan(root).items) == 12


def test_content_decides_not_the_clock(
    folder: Folder, encode: Callable[..., bytes], image: Callable[..., object]
) -> None:
    root = folder({"a.png": (16, 16)})
    path = root / "a.png"
    before, status = Dataset.scan(root), path.stat()
    os.utime(path, ns=(1, 1))
    assert Dataset.scan(root).items == before.items
    path.write_bytes(encode(image(16, 16, seed=9), "PNG"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = Dataset.scan(root)
    assert after.items[0].sha256 != before.items[0].sha256


KOHYA = {"10_my cat/a.png": (16, 16), "3_d/2_e/b.png": (16, 16), "c.png": (16, 16), "f_4/d.png": (16, 16)}


def test_folders_named_for_repeats(folder: Folder) -> None:
    dataset = Dataset.scan(folder(KOHYA), repeats=2, by_folder=True)
    assert [item.key for item in dataset.items] == [*KOHYA]
    assert dataset.repeats_per_image == (20, 6, 2, 2)
    assert dataset.notices == ()


def test_folders_named_for_repeats_are_not_passed_over_in_silence(folder: Folder) -> None:
    dataset = Dataset.scan(folder(KOHYA), repeats=2)
    assert dataset.repeats_per_image == (2, 2, 2, 2)
    (notice,) = dataset.notices
    assert notice.startswith("2 folders are named as kohya's trainers want them for repeats, e.g. 10_my cat: set")


@pytest.mark.parametrize("name", ["0_cat", "1001_cat", "2024_summer", "20240131_trip"])
def test_numbers_that_are_no_repeats_are_a_mistake(folder: Folder, name: str) -> None:
    root = folder({f"{name}/a.png": (16, 16), "1_dog/b.png": (16, 16), "1000_cow/c.png": (16, 16)})
    with pytest.raises(DatasetError, match=rf"{name}: expected repeats from 1 to 1000 before the _") as e:
        Dataset.scan(root, by_folder=True)
    assert len(e.value.problems) == 1
    assert Dataset.scan(root).repeats_per_image == (1, 1, 1)


def test_progress_is_told(folder: Folder) -> None:
    calls: list[tuple[int, int]] = []
    Dataset.scan(folder({f"{i}.png": (16, 16) for i in range(5)}), progress=lambda *at: calls.append(at))
    assert calls == [(i, 5) for i in range(1, 6)]


def test_a_stop_in_the_progress_hook_ends_the_scan(folder: Folder) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Dataset.scan(folder({f"{i}.png": (16, 16) for i in range(5)}), progress=stop)


def test_captions_of_a_whole_folder_in_each_form(folder: Folder) -> None:
    root = folder({"a.png": (16, 16), "sub/b.png": (16, 16), "c.png": (16, 16), "d.png": (16, 16)})
    for path in root.rglob("*.txt"):
        path.unlink()
    (root / "metadata.csv").write_text('file_name,text,other\na.png,"one, two",x\n')
    (root / "sub" / "metadata.jsonl").write_text('{"file_name": "b.png", "text": "bee"}\n')
    (root / "meta_cap.json").write_text('{"c": {"caption": "sea", "tags": "x, y"}, "d.png": {"tags": "dee"}}')
    dataset = Dataset.scan(root)
    assert {item.key: item.captions for item in dataset.items} == {
        "a.png": ("one, two",),
        "c.png": ("sea, x, y",),
        "d.png": ("dee",),
        "sub/b.png": ("bee",),
    }
    assert dataset.notices == ()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "metadata.csv",
            "name,text\na.png,x\n",
            "metadata.csv:1: expected the columns file_name and text",
        ),
        ("metadata.csv", "file_name,text\na.png,x,y\n", "metadata.csv:2: expected 2 columns, got 3"),
        ("metadata.csv", "file_name,text\nz.png,x\n", "metadata.csv:2: there is no image z.png"),
        ("meta_cap.json", "[1]", "meta_cap.json: expected an object by image, got list"),
        ("meta_cap.json", '{"a": "x"}', "meta_cap.json: a: expected an object, got str"),
        ("meta_cap.json", '{"a": {"caption": 3}}', "meta_cap.json: a: caption and tags must be text"),
    ],
)
def test_a_wrong_file_of_captions_is_told(folder: Folder, name: str, text: str, said: str) -> None:
    root = folder({"a.png": (16, 16)})
    (root / name).write_text(text)
    with pytest.raises(DataError) as caught:
        Dataset.scan(root)
    assert said in str(caught.value)


def test_an_image_may_have_several_captions(folder: Folder) -> None:
    root = folder({"a.png": (16, 16), "b.png": (16, 16), "b.1.png": (16, 16)})
    (root / "a.txt").write_text("one\n\n two \n")
    (root / "a.2.txt").write_text("four")
    (root / "a.1.txt").write_text("three")
    (root / "b.1.txt").write_text("its own")
    found = {item.key: item.captions for item in Dataset.scan(root, caption_lines=True).items}
    assert found["a.png"] == ("one", "two", "three", "four")
    assert found["b.1.png"] == ("its own",)
    assert Dataset.scan(root).items[0].captions == ("one two", "three", "four")


def test_the_folders_name_may_be_the_caption(folder: Folder) -> None:
    root = folder({"10_a dog/a.png": (16, 16), "b.png": (16, 16)})
    (root / "10_a dog" / "a.txt").unlink()
    dataset = Dataset.scan(root, folder_captions=True)
    assert dataset.items[0].caption == "a dog"
    assert "1 image without a caption: the folder's name is taken" in dataset.notices


def test_masks_are_no_images_and_fit_theirs(folder: Folder, tmp_path: Path) -> None:
    root = folder({"a.png": (16, 24), "b.png": (16, 16), "c.png": (16, 16)})
    Image.new("L", (24, 16), 255).save(root / "a.mask.png")
    Image.new("L", (16, 16), 255).save(root / "b-masklabel.png")
    off = Dataset.scan(root)
    assert [item.key for item in off.items] == ["a.png", "b.png", "c.png"]
    assert '2 masks are passed over, e.g. a.mask.png: set data.masks = "files" to use them' in off.notices
    dataset = Dataset.scan(root, masks="files")
    assert [item.mask is not None for item in dataset.items] == [True, True, False]
    assert "1 image has no mask: all of it counts" in dataset.notices
    masks = root / "masks"
    masks.mkdir()
    Image.new("L", (16, 16), 255).save(masks / "c.png")
    found = Dataset.scan(root, masks="files", mask_folder=masks)
    assert [item.mask is not None for item in found.items] == [False, False, True]
    Image.new("L", (16, 24), 255).save(root / "a.mask.png")
    with pytest.raises(DatasetError, match=r"a\.mask\.png: a mask of 16x24 pixels for a\.png of 24x16"):
        Dataset.scan(root, masks="files")


def test_an_alpha_channel_may_be_the_mask(folder: Folder) -> None:
    root = folder({"a.png": (16, 16), "b.png": (16, 16)})
    alpha = np.zeros((16, 16), np.uint8)
    alpha[4:8, 2:12] = 200
    image = Image.new("RGB", (16, 16))
    image.putalpha(Image.fromarray(alpha))
    image.save(root / "a.png")
    first, second = Dataset.scan(root, masks="alpha").items
    assert first.mask is not None
    assert second.mask is not None
    assert (first.mask.read() == alpha).all()
    assert (second.mask.read() == 255).all()


NFC, NFD = "zo\u00eb", "zoe\u0308"


@pytest.mark.parametrize("other", ["caption", "mask", "control", "metadata"])
def test_names_match_by_unicode_form(folder: Folder, tmp_path: Path, other: str) -> None:
    """A Mac writes the accent as a code point of its own, and another system may have written the image's name."""
    root = folder({f"{NFC}.png": (16, 16)})
    beside = tmp_path / "beside"
    beside.mkdir()
    if other in ("caption", "metadata"):
        (root / f"{NFC}.txt").unlink()
    if other == "caption":
        (root / f"{NFD}.txt").write_text("zk")
    elif other == "metadata":
        (root / "metadata.jsonl").write_text(json.dumps({"file_name": f"{NFD}.png", "text": "zk"}))
    else:
        place = root / f"{NFD}.mask.png" if other == "mask" else beside / f"{NFD}.png"
        Image.new("L", (16, 16), 100).save(place)
    (item,) = Dataset.scan(root, masks="files", control=[beside] if other == "control" else []).items
    assert item.key == f"{NFC}.png"
    assert other not in ("caption", "metadata") or item.caption == "zk"
    assert (item.mask is not None) == (other == "mask")
    assert len(item.controls) == (other == "control")


def test_two_names_that_look_alike_are_two(folder: Folder) -> None:
    root = folder({f"{NFC}.png": (16, 16), f"{NFD}.png": (16, 16)})
    (root / f"{NFC}.txt").write_text("one")
    (root / f"{NFD}.txt").write_text("two")
    assert {item.key: item.caption for item in Dataset.scan(root).items} == {f"{NFC}.png": "one", f"{NFD}.png": "two"}


@pytest.mark.parametrize("name", ["a.jpg.txt", "A.txt"])
def test_a_caption_that_is_nearly_called_so_is_named(folder: Folder, name: str) -> None:
    root = folder({"a.jpg": (16, 16)})
    (root / "a.txt").rename(root / name)
    with pytest.raises(DatasetError, match=rf"a\.jpg: has no caption: rename {re.escape(name)} to a\.txt"):
        Dataset.scan(root)


def test_a_mark_before_a_mark_is_none_of_the_caption(folder: Folder) -> None:
    root = folder({"a.png": (16, 16), "b.png": (16, 16)})
    (root / "a.txt").write_bytes(b"\xef\xbb\xbf" * 2 + b"zkfox")
    (root / "b.txt").write_text("zk\u200bfox in snow")
    dataset = Dataset.scan(root)
    assert [item.caption for item in dataset.items] == ["zkfox", "zk\u200bfox in snow"]
    (notice,) = dataset.notices
    assert notice == (
        "1 caption holds a character that nobody sees and the model does, e.g. b.txt: U+200B after 'zk': remove it"
    )
