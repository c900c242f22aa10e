"""Who may ask the window, and for what: its token, its origin, its folders; and what it answers to wild questions."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from flame_train import cli
from flame_train.config.load import load
from flame_train.data.clip_files import times, webp
from flame_train.diffusion.objective_kind import OBJECTIVES, Denoising
from flame_train.disk.roots import Roots
from flame_train.errors import ConfigError
from flame_train.quickstart.drawings import write_images
from flame_train.show.serve import Guard

TOKEN = "a-token-of-the-window"
JSON = {"Content-Type": "application/json"}
QUESTIONS = {
    "state": {"toml": ""},
    "change": {"toml": "", "key": "lora.rank", "value": "3"},
    "begin": {"family": "sdxl", "purpose": "style", "card": 24.0, "given": {}, "before": "", "template": ""},
    "import": {"name": "x.toml", "text": "", "family": "", "partial": False},
    "plan": {"toml": "", "device": "cpu", "card": None, "page": "p", "confirmed": []},
    "write": {"toml": "", "path": "x.toml", "device": "cpu", "force": False},
    "images": {"toml": "", "set": 0, "page": 0, "lacking": False},
    "caption": {"toml": "", "set": 0, "file": "a.png", "before": "", "caption": "x"},
    "folders": {"path": ""},
    "models": {},
    "family": {"path": "x", "confirmed": True},
    "example": {"path": "x"},
    "lease": {},
    "take": {},
    "queue": {},
    "run": {"name": "x"},
    "copy": {"name": "x", "how": "clone"},
    "start": {"toml": "", "path": "x.toml", "device": "cpu", "force": False},
    "again": {"name": "x", "device": "cpu"},
    "act": {"name": "x", "entry": "", "what": "stop"},
    "move": {"entry": "x", "what": "up"},
    "settle": {"after_failure": None, "paused": None},
}


class Asker:
    """Asks a window as its own pages do, unless told otherwise."""

    def __init__(self, port, root):
        self.port, self.root = port, root

    def send(self, path, body=None, method="POST", **headers):
        """(status, body) of a request."""
        own = {"Host": f"127.0.0.1:{self.port}", "Cookie": f"flame-train-{self.port}={TOKEN}"}
        own |= {"Origin": f"http://127.0.0.1:{self.port}", **JSON} if method == "POST" else {}
        own |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body, {name: value for name, value in own.items() if value is not None})
        answer = connection.getresponse()
        raw = answer.read()
        connection.close()
        return answer.status, raw

    def ask(self, what, **question):
        """(status, answer) of a question."""
        status, raw = self.send(f"/ask/{what}", json.dumps(QUESTIONS[what] | question))
        return status, json.loads(raw)

    def config(self, folder, **more):
        """A text of this folder of images."""
        lines = "".join(f"{name} = {value}\n" for name, value in more.items())
        return f'[data]\npath = "{folder}"\nresolution = 96\nbucket_step = 32\n{lines}'


@pytest.fixture
def asker(serve, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    return Asker(serve(root, token=TOKEN, window=True), root)


@pytest.fixture
def images(asker):
    """Four images with captions below the root."""
    write_images(asker.root / "photos", 4, 1)
    return asker.root / "photos"


# ---- who may ask -------------------------------------------------------------------------------------------


def test_without_the_token_nothing_is_told_or_done(asker):
    for path in ("/new", "/form.json", "/picture?path=x", "/ui/new.js", "/"):
        assert asker.send(path, method="GET", Cookie="")[0] == 403
        assert asker.send(path, method="GET", Cookie=f"flame-train-{asker.port}=x")[0] == 403
    for what, question in QUESTIONS.items():
        assert asker.send(f"/ask/{what}", json.dumps(question), Cookie="")[0] == 403
        assert asker.send(f"/ask/{what}", method="GET")[0] == 405


def test_there_is_no_window_without_a_token():
    with pytest.raises(ValueError, match="expected a token"):
        Guard(None, 80, changes=True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": None}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "https://127.0.0.1:{port}"}, 403),
        ({"Origin": "http://localhost:{port}"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "navigate"}, 403),
        ({"Host": "evil.example"}, 421),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content_Length": "9999999999"}, 413),
        ({"Content_Length": str((2 << 20) + 1)}, 413),
    ],
)
def test_a_change_comes_from_the_windows_own_pages_alone(asker, images, headers, status):
    file = sorted(images.glob("*.png"))[0]
    before = file.with_suffix(".txt").read_text()
    question = QUESTIONS["caption"] | {"toml": asker.config(images), "file": file.name, "before": before.strip()}
    sent = {name: value and value.format(port=asker.port) for name, value in headers.items()}
    assert asker.send("/ask/caption", json.dumps(question), **sent)[0] == status
    assert file.with_suffix(".txt").read_text() == before
    assert asker.send("/ask/caption", json.dumps(question), Sec_Fetch_Site="same-origin")[0] == 200


def test_no_other_sites_page_gets_a_picture_but_a_link_opens_the_page(asker, images):
    path = f"/picture?path={sorted(images.glob('*.png'))[0]}"
    assert asker.send(path, method="GET")[0] == 200
    assert asker.send("/", method="GET")[0] == 307  # no run is there: to the page of a new one
    for site in ("cross-site", "same-site"):
        assert asker.send(path, method="GET", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors")[0] == 403
    assert asker.send("/new", method="GET", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200


def test_a_change_of_unknown_length_is_refused(asker):
    head = f"POST /ask/state HTTP/1.1\r\nHost: 127.0.0.1:{asker.port}\r\nCookie: flame-train-{asker.port}={TOKEN}\r\n"
    head += f"Origin: http://127.0.0.1:{asker.port}\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    with socket.create_connection(("127.0.0.1", asker.port), timeout=30) as connection:
        connection.sendall(f"{head}\r\n5\r\nhello\r\n0\r\n\r\n".encode())
        assert connection.recv(65536).split()[1] == b"411"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b'{"toml": 5}',
        b'{"toml": "", "more": 1}',
        b"[" * 100_000,
        b"\xff",
        b'{"toml": "\\ud800"}',
        b'{"toml": "' + b"x" * (1 << 20) + b'x"}',
        b'{"toml": "a = 1' + b"0" * 6000 + b'"}',
        b'{"toml": "a = ' + b"[" * 3000 + b'"}',
    ],
)
def test_a_wild_question_is_answered_and_no_bug(asker, body):
    for what in QUESTIONS:
        if QUESTIONS[what]:
            status, raw = asker.send(f"/ask/{what}", body)
            assert status in (200, 400), (what, raw)
            json.loads(raw)
    assert asker.ask("state")[0] == 200


# ---- which files -------------------------------------------------------------------------------------------

OUTSIDE = (
    "/etc",
    "/etc/passwd",
    "..",
    "../..",
    "{root}/..",
    "{root}/../secret",
    "{root}/link",
    "{root}/link/deep",
    "~",
    "{root}x",
    "",
    "\0",
    "{root}/\0",
    "//etc",
    "\ud800",
    "{root}/\ud800",
    "{root}/photos/../../secret",
)


@pytest.fixture
def secret(asker, images, tmp_path):
    """A folder outside of the root that a link in it leads to, with all that the window could be made to give."""
    folder = tmp_path / "secret"
    write_images(folder, 4, 3)
    (folder / "secret.toml").write_text("network_dim = 24\n")
    os.symlink(folder, asker.root / "link")
    return folder


@pytest.mark.parametrize("path", OUTSIDE)
def test_no_path_outside_the_roots_is_read_or_written(asker, secret, path):
    path = path.format(root=asker.root)
    before = {file: file.stat().st_mtime_ns for file in secret.iterdir()}
    name = sorted(secret.glob("*.png"))[0].name
    for place in (path, f"{path}/{name}"):
        query = "".join(f"%{byte:02x}" for byte in place.encode("utf-8", "surrogatepass"))
        assert asker.send(f"/picture?path={query}", method="GET")[0] == 404
    for what, question in {
        "folders": {"path": path},
        "family": {"path": path},
        "example": {"path": path},
        "write": {"toml": asker.config(asker.root / "photos"), "path": f"{path}/x.toml"},
        "images": {"toml": asker.config(json.dumps(path)[1:-1])},
        "caption": {"toml": asker.config(json.dumps(path)[1:-1]), "file": name, "before": "", "caption": "x"},
    }.items():
        if (what, path) == ("folders", ""):  # the list of the roots
            continue
        status, told = asker.ask(what, **question)
        assert status == 400, (what, told)
        assert "secret.toml" not in json.dumps(told)
    assert {file: file.stat().st_mtime_ns for file in secret.iterdir()} == before


@pytest.mark.parametrize("key", ["model.checkpoint", "data.path", "output.dir", "lora.from", "sample.prompt_file"])
def test_a_key_of_a_text_names_no_place_outside(asker, secret, key):
    section, name = key.split(".")
    for path in ("/etc", f"{asker.root}/../secret", f"{asker.root}/link"):
        text = f"[{section}]\n{name} = {json.dumps(path)}\n"
        for answer in (asker.ask("state", toml=text), asker.ask("plan", toml=text)):
            told = [problem for problem in answer[1]["problems"] if problem["key"] == key]
            assert any("expected a place below" in problem["message"] for problem in told), answer


def test_tables_of_a_text_name_no_place_outside(asker, secret):
    text = f'[data]\nsets = [{{path = "{asker.root}/photos", control = "/etc"}}]\n[sample]\n'
    text += 'prompts = [{text = "x", control = ["/etc/passwd"]}]\n'
    told = {problem["key"] for problem in asker.ask("state", toml=text)[1]["problems"]}
    assert {"data.sets", "sample.prompts"} <= told


def test_a_link_among_the_images_that_leads_out_is_told(asker, images, secret):
    os.symlink(sorted(secret.glob("*.png"))[0], images / "planted.png")
    status, told = asker.ask("images", toml=asker.config(images))
    assert status == 400
    assert "planted.png: is a link out of the folders that this window was started for" in told["error"]
    assert "planted.png" in json.dumps(asker.ask("plan", toml=asker.config(images))[1]["problems"])


def test_a_dropped_config_reads_no_file_that_it_names_outside(asker, secret):
    text = 'network_module = "networks.lora"\nlearning_rate = 1e-4\ndataset_config = "{}"\n'
    for name in (secret / "secret.toml", "/etc/hostname", "secret.toml"):
        answer = json.dumps(asker.ask("import", name="x.toml", text=text.format(name), family="sdxl", partial=True))
        assert "no such file beside this one" in answer


def test_models_outside_are_not_found_through_links(asker, tmp_path, small_base):
    (tmp_path / "other").mkdir()
    os.link(small_base, tmp_path / "other" / "base.safetensors") if os.stat(small_base).st_dev == os.stat(
        tmp_path
    ).st_dev else (tmp_path / "other" / "base.safetensors").write_bytes(small_base.read_bytes())
    os.symlink(tmp_path / "other", asker.root / "linked")
    os.symlink(tmp_path / "other" / "base.safetensors", asker.root / "linked.safetensors")
    assert asker.ask("models")[1] == {"models": [], "note": ""}
    (asker.root / "own.safetensors").write_bytes(small_base.read_bytes())
    (asker.root / ".hidden").mkdir()
    (asker.root / ".hidden" / "own.safetensors").write_bytes(small_base.read_bytes())
    found = asker.ask("models")[1]["models"]
    assert [(each["name"], each["family"]) for each in found] == [("own.safetensors", "sdxl")]


def test_no_root_that_is_no_folder(tmp_path, capsys):
    assert cli.run(["ui", "--root", str(tmp_path / "nothing")]) == 2
    assert "expected a folder" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--root"):
        Roots([tmp_path / "nothing"])


# ---- what it answers ---------------------------------------------------------------------------------------


def test_images_have_their_bucket_crop_caption_and_companions(asker, images):
    (images / "orphan.txt").write_text("nobody's")
    for file in images.glob("*.png"):
        file.unlink(missing_ok=True)
    Image.fromarray(np.zeros((100, 200, 3), np.uint8)).save(images / "wide.png")
    Image.fromarray(np.full((100, 200), 255, np.uint8)).save(images / "wide.mask.png")
    (asker.root / "before").mkdir()
    Image.fromarray(np.zeros((100, 200, 3), np.uint8)).save(asker.root / "before" / "wide.png")
    text = asker.config(images, masks='"files"', control=f'["{asker.root}/before"]')
    status, found = asker.ask("images", toml=text)
    assert status == 200
    (row,) = found["images"]
    assert (found["count"], found["without_caption"]) == (1, 1)
    assert "orphan.txt" in found["captions_without_image"]
    assert (row["caption"], row["written_in"], row["editable"]) == ("", "", True)
    assert row["mask"]["path"].endswith("wide.mask.png")
    assert [each["path"] for each in row["controls"]] == [str(asker.root / "before" / "wide.png")]
    seen = [each["seen"] for each in (row["image"], row["mask"], *row["controls"])]
    files = [each["path"] for each in (row["image"], row["mask"], *row["controls"])]
    assert seen == [hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] for file in files]
    placed = row["placements"][0]
    assert placed["bucket"] == "128x64"
    assert placed["shares"] == [0, 0, 1, 1]
    for path, mask in zip(files, ("", "&mask=yes", ""), strict=True):
        status, raw = asker.send(f"/picture?path={path}&side=50{mask}", method="GET")
        assert (status, raw[:2]) == (200, b"\xff\xd8")


def test_clips_are_shown_by_their_first_frame_beside_stills(asker, images):
    for file in images.glob("*.png"):
        file.unlink()
    pixels = np.zeros((9, 100, 200, 3), np.uint8)
    pixels[..., 0] = 200 - 20 * np.arange(9)[:, None, None]
    (images / "clip.webp").write_bytes(webp(pixels, times(9, 24)))
    (images / "short.webp").write_bytes(webp(pixels[:2], times(2, 24)))
    Image.fromarray(pixels[0]).save(images / "still.png")
    status, found = asker.ask("images", toml=asker.config(images, frames="[5]"))
    assert (status, found["count"]) == (200, 3)
    clip, short, still = found["images"]
    assert (clip["placements"][0]["bucket"], clip["placements"][0]["span"]["count"]) == ("128x64", 5)
    assert "a clip of 2 frames at 24 a second, expected 5" in short["placements"][0]["problem"]
    assert "span" not in still["placements"][0]
    status, raw = asker.send(f"/picture?path={images}/clip.webp&side=50", method="GET")
    with Image.open(io.BytesIO(raw)) as image:
        assert (status, image.format, image.size) == (200, "JPEG", (50, 25))
        assert image.getpixel((25, 12))[0] > 150
    (images / "broken.mp4").write_bytes(b"\0\0\0\x18ftypisom" + bytes(64))
    assert asker.send(f"/picture?path={images}/broken.mp4&side=50", method="GET")[0] == 404
    status, found = asker.ask("images", toml=asker.config(images))  # no clips: told, as the plan tells it
    assert (status, [row["file"] for row in found["images"]]) == (200, ["still.png"])
    assert any("several frames" in notice for notice in found["notices"])


class Pairs(Denoising):
    name = "denoising"
    group = ("win", "lose")


def test_groups_share_a_caption_and_are_shown_with_it(asker, images, monkeypatch):
    monkeypatch.setitem(OBJECTIVES._entries, "denoising", Pairs)
    for file in list(images.iterdir()):
        file.unlink()
    for ending in ("win", "lose"):
        Image.fromarray(np.zeros((96, 96, 3), np.uint8)).save(images / f"a.{ending}.png")
    (images / "a.txt").write_text("a fox")
    status, found = asker.ask("images", toml=asker.config(images))
    assert (status, found["without_caption"], found["captions_without_image"]) == (200, 0, [])
    assert [(row["file"], row["caption"], row["editable"]) for row in found["images"]] == [
        ("a.lose.png", "a fox", False),
        ("a.win.png", "a fox", False),
    ]


def test_the_list_of_runs_is_shown_also_of_one(asker, made):
    assert b"No run is here yet" in asker.send("/runs", method="GET")[1]
    made("root/run")
    for path in ("/", "/runs"):
        status, page = asker.send(path, method="GET")
        assert (status, b"/run?name=run" in page) == (200, True)


def test_a_caption_is_saved_unless_it_was_changed_meanwhile_or_stands_elsewhere(asker, images):
    file = sorted(images.glob("*.png"))[0]
    own, text = file.with_suffix(".txt"), asker.config(images)
    was = own.read_text().strip()
    saved = {"toml": text, "file": file.name, "before": was, "caption": " two\nlines\r\n "}
    assert asker.ask("caption", **saved) == (200, {"caption": "two lines", "written_in": own.name})
    assert own.read_text() == "two lines\n"
    status, told = asker.ask("caption", **saved)
    assert (status, told["now"]) == (409, "two lines")
    for name in ("../secret.png", "nothing.png", "", file.name + "\0", "/etc/passwd"):
        assert asker.ask("caption", **saved | {"file": name})[0] == 400
    for caption in ("x" * 70_000, "a\0b", "\ud800"):
        assert asker.ask("caption", **saved | {"before": "two lines", "caption": caption})[0] == 400
    twin = file.with_suffix(".jpg")
    Image.open(file).save(twin)
    status, told = asker.ask("caption", **saved | {"before": "two lines"})
    assert (status, f"{own.name}; change it there" in told["error"]) == (400, True)
    twin.unlink()
    own.unlink()
    (images / "metadata.jsonl").write_text(json.dumps({"file_name": file.name, "text": "in a list"}) + "\n")
    status, told = asker.ask("caption", **saved | {"before": "in a list"})
    assert (status, "metadata.jsonl; change it there" in told["error"]) == (400, True)
    assert not own.exists()


def test_a_config_is_written_once_whole_and_not_over_another(asker, images, small_base):
    (asker.root / "base.safetensors").write_bytes(small_base.read_bytes())
    text = (
        asker.config(images)
        + f'[model]\ncheckpoint = "{asker.root}/base.safetensors"\n[output]\ndir = "{asker.root}/run"\n'
    )
    path = f"{asker.root}/new/fox.toml"
    status, told = asker.ask("write", toml=text, path=path)
    assert (status, told["command"]) == (200, f"flame-train train {path} --device cpu")
    assert load(path).output.dir == f"{asker.root}/run"
    status, told = asker.ask("write", toml=text + "# again\n", path=path)
    assert (status, "exists already" in told["error"]) == (400, True)
    assert asker.ask("write", toml=text + "# again\n", path=path, force=True)[0] == 200
    assert Path(path).read_text().endswith("# again\n")
    for wrong in (f"{asker.root}/x.txt", f"{asker.root}/.toml", str(asker.root)):
        assert asker.ask("write", toml=text, path=wrong)[0] == 400
    status, told = asker.ask("write", toml=text + "[lora]\nrank = 0\n", path=f"{asker.root}/y.toml")
    assert (status, "lora.rank" in told["error"]) == (400, True)


def test_the_command_serves_behind_a_token_until_ctrl_c(tmp_path, forked):
    command = [*forked, "-m", "flame_train", "ui", "--root", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        address = urlsplit(process.stdout.readline().split()[0])
        assert address.hostname == "127.0.0.1"
        asker = Asker(address.port, tmp_path)
        assert asker.send("/new", method="GET", Cookie="")[0] == 403
        assert asker.send(f"/new?{address.query}", method="GET", Cookie="")[0] == 303
        token = address.query.removeprefix("token=")
        assert asker.send("/new", method="GET", Cookie=f"flame-train-{address.port}={token}")[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
