"""`flame-train caption` against a server of the test's own: what it asks, keeps and writes, and how it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flame_train import cli
from flame_train.data.clip_files import mp4, times, webp
from flame_train.data.dataset import Dataset
from flame_train.errors import ConfigError
from flame_train.tools.captions import chat
from flame_train.tools.captions.caption_folder import question
from tests.tools.chat_server import Asked, ChatServer, Reply, chat_server, says


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    monkeypatch.setattr(chat, "_WAITS", (0.0, 0.0))
    with chat_server() as served:
        yield served


def images(folder: Path, count: int) -> list[str]:
    """Draws images that differ by their red, 10 a step."""
    folder.mkdir(exist_ok=True)
    names = [f"{number:02}.png" for number in range(count)]
    for number, name in enumerate(names):
        Image.new("RGB", (16, 24), (number * 10, 0, 0)).save(folder / name)
    return names


def number_of(asked: Asked) -> int:
    """Says which image of `images` a server was shown."""
    return round(float(np.asarray(asked.image)[..., 0].mean()) / 10)


def caption(capsys: pytest.CaptureFixture[str], folder: Path, *options: str, status: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.run(["caption", str(folder), *options, "--json"]) == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def refusal(capsys: pytest.CaptureFixture[str], folder: Path, *options: str, status: int) -> str:
    capsys.readouterr()
    assert cli.run(["caption", str(folder), *options]) == status
    return capsys.readouterr().err


def test_a_killed_command_goes_on_where_it_was(
    tmp_path: Path, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    names = images(tmp_path / "set", 12)
    fifth, end = threading.Event(), threading.Event()

    def five(asked: Asked) -> Reply:
        if len(server.asked) > 5:
            fifth.set()
            end.wait(60)
        return says(f"shape {number_of(asked)}")

    server.reply = five
    command = [sys.executable, "-m", "flame_train", "caption", str(tmp_path / "set"), "--server", server.address]
    process = subprocess.Popen([*command, "--jobs", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert fifth.wait(60)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    end.set()
    there = sorted(path.name for path in (tmp_path / "set").glob("*.txt"))
    assert there == [f"{number:02}.txt" for number in range(5)]
    asked_before = len(server.asked)
    server.reply = lambda asked: says(f"shape {number_of(asked)}")
    result = caption(capsys, tmp_path / "set", "--server", server.address)
    assert (result["captions_kept"], result["captions_written"]) == (5, 7)
    assert sorted(map(number_of, server.asked[asked_before:])) == list(range(5, 12))
    dataset = Dataset.scan(tmp_path / "set", caption_endings=(".txt",))
    assert [(item.key, item.caption) for item in dataset.items] == [(n, f"shape {i}") for i, n in enumerate(names)]


def test_of_a_clip_the_frame_in_its_middle_is_seen(
    tmp_path: Path, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("av", reason="videos are an extra")
    reds = np.zeros((9, 24, 16, 3), np.uint8)
    reds[..., 0] = 10 * np.arange(9)[:, None, None]
    (tmp_path / "a.mp4").write_bytes(mp4(reds, 24))
    (tmp_path / "b.webp").write_bytes(webp(reds[2:7], times(5, 24)))
    server.reply = lambda asked: says(f"shape {number_of(asked)}")
    result = caption(capsys, tmp_path, "--server", server.address)
    assert result["captions_written"] == 2
    assert [(tmp_path / f"{name}.txt").read_text().strip() for name in "ab"] == ["shape 4", "shape 4"]
    (tmp_path / "d.mp4").write_bytes((tmp_path / "a.mp4").read_bytes())
    Image.new("RGB", (16, 24), (70, 0, 0)).save(tmp_path / "d.png")  # a still with a film beside it, as of telephones
    assert caption(capsys, tmp_path, "--server", server.address)["captions_written"] == 1
    assert (tmp_path / "d.txt").read_text().strip() == "shape 7"
    (tmp_path / "c.webm").write_bytes((tmp_path / "a.mp4").read_bytes()[:-400])
    result = caption(capsys, tmp_path, "--server", server.address, status=3)
    assert "c.webm: " in result["errors"][0]


def test_ctrl_c_says_what_is_written(tmp_path: Path, server: ChatServer) -> None:
    images(tmp_path / "set", 3)
    second, end = threading.Event(), threading.Event()

    def one(asked: Asked) -> Reply:
        if len(server.asked) > 1:
            second.set()
            end.wait(60)
        return says("a shape")

    server.reply = one
    command = [sys.executable, "-m", "flame_train", "caption", str(tmp_path / "set"), "--server", server.address]
    with subprocess.Popen(
        [*command, "--jobs", "1"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
    ) as process:
        assert second.wait(60)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    end.set()
    assert (process.returncode, said) == (
        130,
        "interrupted: 1 caption is written, 2 to go; the same command goes on\n",
    )


def test_several_are_asked_at_once_and_the_image_is_what_training_sees(
    tmp_path: Path, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    images(tmp_path, 3)
    together = threading.Barrier(3)

    def wait(asked: Asked) -> Reply:
        together.wait(60)
        return says("a shape")

    server.reply = wait
    caption(capsys, tmp_path, "--server", server.address, "--jobs", "3")
    assert server.most_at_once == 3
    clear = Image.new("RGBA", (400, 100), (0, 0, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6
    clear.save(tmp_path / "turned.png", exif=exif)
    server.reply, server.asked[:] = lambda asked: says("nothing"), []
    caption(capsys, tmp_path, "--server", f"{server.address}/chat/completions", "--side", "80", "--ask", "tags")
    (asked,) = server.asked
    assert asked.image.size == (20, 80)
    assert np.asarray(asked.image).min() > 250
    assert asked.body["model"] == "seer"
    assert asked.question == question("tags")
    assert "Authorization" not in asked.headers


def test_what_is_there_is_kept_wherever_training_reads_it(
    tmp_path: Path, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    images(tmp_path, 5)
    (tmp_path / "00.txt").write_text("own words\nin two lines", encoding="utf-8")
    (tmp_path / "01.caption").write_text("", encoding="utf-8")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "02.png", "text": "told"}\n', encoding="utf-8")
    (tmp_path / "03.1.txt").write_text("numbered", encoding="utf-8")
    Image.new("L", (16, 24)).save(tmp_path / "04.mask.png")
    result = caption(capsys, tmp_path, "--server", server.address)
    assert (result["captions_kept"], result["captions_written"]) == (4, 1)
    assert (result["longest"], result["empty"]) == ("00.png (5 words)", ["01.png"])
    assert (tmp_path / "04.txt").read_text(encoding="utf-8") == "a shape\n"
    assert not (tmp_path / "04.mask.txt").exists()
    result = caption(capsys, tmp_path, "--server", server.address, "--overwrite", status=3)
    assert result["captions_written"] == 4
    assert result["errors"] == ["02.png: metadata.jsonl has its caption: remove that line to have a new one"]
    assert (tmp_path / "00.txt").read_text(encoding="utf-8") == "a shape\n"


def test_one_bad_image_or_answer_does_not_end_the_rest(
    tmp_path: Path, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    images(tmp_path, 7)
    (tmp_path / "00.png").write_bytes(b"no image")
    Image.new("RGB", (16, 16)).save(tmp_path / "06.jpg")
    odd = {
        1: says("<think>hm</think>\n  two\r\nlines\x00 \ud800"),
        2: says("", "length"),
        3: (400, {"error": {"message": "no vision"}}),
        4: says("half a", "length"),
        5: (200, {"nothing": 1}),
    }
    server.reply = lambda asked: odd[number_of(asked)]
    result = caption(capsys, tmp_path, "--server", server.address, "--jobs", "1", status=8)
    assert (tmp_path / "01.txt").read_text(encoding="utf-8") == "two lines\n"
    assert sorted(path.name for path in tmp_path.glob("*.txt")) == ["01.txt", "04.txt"]
    assert (result["without_caption"], result["empty"], result["cut_as_too_long"]) == (6, ["02.png"], ["04.png"])
    said = "\n".join(result["errors"])
    for words in (
        "00.png: expected an image, but its content is text",
        "02.png: the answer is empty",
        "03.png: http://127.0.0.1",
        "the server answered 400 (no vision)",
        "05.png: expected an answer with choices[0].message.content",
        "06.jpg: another image has the same name but for its ending",
    ):
        assert words in said


def test_a_server_that_is_busy_is_asked_again_and_one_that_is_gone_ends_it(
    tmp_path: Path, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    images(tmp_path, 25)
    replies = iter([(503, "loading"), (429, "busy"), says("a shape")])
    server.reply = lambda asked: next(replies, (500, "out of memory"))
    said = refusal(capsys, tmp_path, "--server", server.address, "--jobs", "1", status=8)
    assert "10 images in a row got no caption" in said
    assert "1 caption is written" in said
    assert "(out of memory)" in said
    assert len(server.asked) == 3 + 10 * 3
    unused = server.address.replace("127.0.0.1", "127.0.0.2")
    said = refusal(capsys, tmp_path, "--server", unused, status=8)
    assert "the server does not answer" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("at_models", [True, False])
def test_no_redirect_is_followed(
    tmp_path: Path, server: ChatServer, capsys: pytest.CaptureFixture[str], at_models: bool
) -> None:
    images(tmp_path, 1)
    with chat_server() as other:
        away: Reply = 307, "", {"Location": f"{other.address}/chat/completions"}
        if at_models:
            server.models = away
            said = refusal(capsys, tmp_path, "--server", server.address, status=8)
        else:
            server.reply = lambda asked: away
            said = caption(capsys, tmp_path, "--server", server.address, status=8)["errors"][0]
        assert f"the server sends requests on to {other.address}" in said
        assert (other.asked, other.gets) == ([], [])


def test_the_key_is_sent_and_stands_in_no_message(
    tmp_path: Path, server: ChatServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    images(tmp_path, 1)
    monkeypatch.setenv("SEER_KEY", "sk-secret")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.2:1")
    server.reply = lambda asked: (401, {"error": f"wrong key {asked.headers['Authorization']}"})
    options = "--server", server.address, "--key-variable", "SEER_KEY"
    (error,) = caption(capsys, tmp_path, *options, status=8)["errors"]
    assert "the server answered 401 (wrong key Bearer (key))" in error
    said = refusal(capsys, tmp_path, "--server", server.address, "--key-variable", "OTHER", status=2)
    assert "expected a key in the variable OTHER" in said


def test_models_are_named_where_the_name_is_wrong(
    tmp_path: Path, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    images(tmp_path, 1)
    server.models = 200, {"data": [{"id": "seer"}, {"id": "teller"}]}
    said = refusal(capsys, tmp_path, "--server", server.address, status=2)
    assert "--model: expected one of seer, teller" in said
    server.reply = lambda asked: (404, {"error": "no such model"})
    (error,) = caption(capsys, tmp_path, "--server", server.address, "--model", "sear", status=8)["errors"]
    assert "404 (no such model); its models are seer, teller" in error


def test_options_that_do_not_go_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local = "--server", "http://127.0.0.1:1"
    wrong = {
        (): "expected --server URL or --tagger DIR",
        (*local, "--threshold", "0.5"): "--threshold goes with --tagger",
        (*local, "--ask", "scene"): "add --trigger WORD",
        (*local, "--trigger", "zk"): "leave --trigger out",
        (*local, "--extension", "txt"): "expected an ending such as .txt",
        ("--server", "ollama"): "expected an address such as",
        ("--server", "http://user:secret@host/v1"): "expected an address without a login",
    }
    for options, words in wrong.items():
        said = refusal(capsys, tmp_path, *options, status=2)
        assert words in said
        assert "secret" not in said
    said = refusal(capsys, tmp_path, *local, status=3)
    assert "expected a folder of images, found none" in said


def test_a_question_has_the_trigger_in_its_place() -> None:
    assert "Call its main subject zkfox, and say nothing" in question("scene", trigger="zkfox")
    assert question("tags", own="Where is [trigger]?", trigger="zk") == "Where is zk?"
    with pytest.raises(ConfigError, match="leave --trigger out"):
        question("tags", own="What?", trigger="zk")


def test_an_address_is_read_with_and_without_its_version() -> None:
    bases = {"http://h:1": "http://h:1/v1", "http://h:1/": "http://h:1/v1", "https://h/api/v3/": "https://h/api/v3"}
    assert {address: chat.base_address(address) for address in bases} == bases
