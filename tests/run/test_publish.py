"""Publishing a run, to a stand-in for the hub: what is sent, what is not, and what a broken upload leaves."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from huggingface_hub import constants
from ruamel.yaml import YAML

from flame_train import cli
from flame_train.config.load import load
from flame_train.config.render import resolved
from flame_train.errors import RemoteError
from flame_train.io.hub_upload import WRITTEN_ANEW, check_login
from flame_train.run.commands.stages import train
from flame_train.run.finish.model_card import model_card
from flame_train.run.finish.publish import publish
from flame_train.show.run_reader import RunReader

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the hub's client

TOKEN = "a-token-of-another-form"
NAME = "owner/circles"


class Hub(ThreadingHTTPServer):
    """Repositories by name, each with its files; `breaks` refuses what is sent to large files' storage."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.large: dict[str, bytes] = {}
        self.heard: list[tuple[str, str, bytes]] = []
        self.breaks = False

    @property
    def place(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, name: str, body: bytes) -> None:
        files = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
        self.files[name] |= files


class Asked(BaseHTTPRequestHandler):
    server: Hub

    def answer(self, status: int, body: Any = None, **headers: str) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, hub = self.path.partition("?")[0], self.server
        hub.heard.append((self.command, path, body))
        if path.startswith("/large/"):
            assert self.headers.get("Authorization") is None  # the place of large files is another's
            if not hub.breaks:
                hub.large[path.removeprefix("/large/")] = body
            return self.answer(403 if hub.breaks else 200)
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            hub.private[name] = asked.get("visibility", "private" if asked.get("private") else "public") == "private"
            hub.files[name] = {}
            return self.answer(200, {"url": f"{hub.place}/{name}"})
        name = re.sub(r"\A/(api/models/)?([^/]+/[^/]+?)(\.git)?(/.*)?\Z", r"\2", path)
        if name not in hub.files:
            return self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        return self.of_repository(name, path, body)

    def of_repository(self, name: str, path: str, body: bytes) -> None:
        hub, files = self.server, self.server.files[name]
        if "/preupload/" in path:
            asked = [each["path"] for each in json.loads(body)["files"]]
            modes = {file: "regular" if file.endswith(".md") else "lfs" for file in asked}
            rows = [{"path": file, "uploadMode": mode, "shouldIgnore": False} for file, mode in modes.items()]
            return self.answer(200, {"files": rows})
        if path.endswith("/objects/batch"):
            rows = json.loads(body)["objects"]
            for row in rows:
                if row["oid"] not in hub.large:
                    row["actions"] = {"upload": {"href": f"{hub.place}/large/{row['oid']}"}}
            return self.answer(200, {"transfer": "basic", "objects": rows})
        if "/commit/" in path:
            hub.commit(name, body)
            return self.answer(200, {"commitUrl": f"{hub.place}/{name}/commit/1", "commitOid": "1" * 40})
        if "/resolve/" in path:
            raw = files[path.rpartition("/")[2]]
            return self.answer(200, raw, ETag=f'"{hashlib.sha1(raw).hexdigest()}"', X_Repo_Commit="1" * 40)
        siblings = [{"rfilename": file} for file in files]
        return self.answer(200, {"id": name, "private": hub.private[name], "siblings": siblings, "sha": "1" * 40})

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.place)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.place + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


def tensors(raw: bytes) -> dict[str, bytes]:
    """A file's tensors, as the library reads them."""
    return {name: array.tobytes() for name, array in safetensors.numpy.load(raw).items()}


@pytest.fixture
def asked(tiny_base, drawn, tmp_path):
    """The sections of a config of two steps, with two prompts."""
    return {
        "model": {"checkpoint": str(tiny_base)},
        "data": {"path": str(drawn), "resolution": 64, "bucket_step": 32},
        "captions": {"trigger": "zk circle"},
        "lora": {"rank": 2},
        "train": {"precision": "fp32", "steps": 2},
        "checkpoint": {"every": 1},
        "sample": {"prompts": ["a red circle", 'a "blue" square: `one`'], "every": 2, "steps": 1},
        "output": {"dir": str(tmp_path / "run"), "precision": "fp16", "name": "circles", "hub": f"hf:{NAME}"},
    }


def test_a_run_that_broke_off_its_upload_is_whole_and_the_same_command_goes_on(hub, asked, tmp_path, caplog, drawn):
    run = tmp_path / "run"
    hub.breaks = True
    broken = train(asked, [], "cpu", False)
    assert broken["hub"]["url"] is None
    assert broken["hub"]["again"] == f"flame-train publish {run} --to hf:{NAME}"
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    assert hub.files[NAME] == {}  # nothing of it, rather than a part
    hub.breaks = False
    result = train(asked, [], "cpu", False)
    assert result["hub"] == {"repository": NAME, "url": f"{hub.place}/{NAME}"}
    there = hub.files[NAME]
    assert hub.private == {NAME: True}
    assert set(there) == {"circles.safetensors", "README.md", "samples/1.png", "samples/2.png"}
    assert tensors(there["circles.safetensors"]) == tensors((run / "circles.safetensors").read_bytes())
    sent = b"".join(body for _, _, body in hub.heard)
    assert not [file for file in drawn.rglob("*.png") if file.read_bytes() in sent]
    captions = [file.read_text() for file in drawn.rglob("*.txt")]
    assert len(captions) == 12
    assert not [text for text in captions if text.encode() in sent]
    assert str(tmp_path).encode() not in sent
    kept = [file.read_bytes() for file in run.rglob("*") if file.is_file()]
    assert not [raw for raw in (*kept, sent, caplog.text.encode(), repr(broken).encode()) if TOKEN.encode() in raw]
    hub.heard.clear()
    assert publish(run, NAME)["url"] == result["hub"]["url"]
    assert not [path for command, path, _ in hub.heard if command == "PUT"]  # what is there is not sent again


def test_what_is_published_of_a_run(hub, asked, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    del asked["output"]["hub"]
    assert "hub" not in train(asked, [], "cpu", False)
    assert hub.heard == []
    assert cli.run(["publish", str(run), "--to", f"hf:{NAME}", "--dry-run"]) == 0
    card = capsys.readouterr().out
    assert hub.heard == []
    front = YAML(typ="safe").load(card.split("---\n")[1])
    assert front["instance_prompt"] == "zk circle"
    assert [each["text"] for each in front["widget"]] == asked["sample"]["prompts"]
    assert "base_model" not in front  # base.safetensors is nobody's
    assert "lora.rank = 2" in card
    assert "data.path" not in card
    result = publish(run, NAME, step=1)
    saved = run / "checkpoints" / "step-000001" / "circles-000001.safetensors"
    assert tensors(hub.files[NAME]["circles-000001.safetensors"]) == tensors(saved.read_bytes())
    assert result["files"][-1] == "samples/2.png"  # of step 0, the last grid until then
    edited = hub.files[NAME]["README.md"].replace(WRITTEN_ANEW.encode(), b"Mine.")
    hub.files[NAME]["README.md"] = edited
    publish(run, NAME)
    assert hub.files[NAME]["README.md"] == edited
    hub.private[NAME] = False
    with pytest.raises(RemoteError, match="is there already and public"):
        publish(run, NAME)
    assert publish(run, NAME, public=True)["url"]
    for options, code, told in (
        (["--to", "circles"], 2, "owner/name"),
        (["--to", NAME, "--step", "7"], 6, "there are steps 1, 2"),
    ):
        assert cli.run(["publish", str(run), *options]) == code
        assert told in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}-of-nobody")
    assert cli.run(["publish", str(run), "--to", NAME]) == 8
    told = capsys.readouterr().err
    assert "not published" in told
    assert TOKEN not in told


def test_a_token_goes_to_the_hub_alone_and_its_lack_is_told_before_the_run(hub, asked, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example.org")
    with pytest.raises(RemoteError, match=r"sent to huggingface\.co alone"):
        check_login()
    monkeypatch.setattr(constants, "ENDPOINT", hub.place)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(RemoteError, match="hf auth login"):
        train(asked, [], "cpu", False)
    assert not (tmp_path / "run").exists()
    plan = train(asked, [], "cpu", True)
    assert plan["hub"] == {"repository": NAME, "public": False}
    assert hub.heard == []


@pytest.mark.parametrize(
    ("family", "data", "task"),
    [
        ("sdxl", {"path": "a"}, "text-to-image"),
        ("wan", {"path": "a"}, "text-to-video"),
        ("qwenimage1", {"path": "a", "control": ["b"]}, "image-to-image"),
        ("flux2", {"sets": [{"path": "a", "control": "c"}]}, "image-to-image"),
    ],
)
def test_the_hub_files_a_lora_by_what_it_is_for(tmp_path, family, data, task):
    config = load({"model": {"checkpoint": "base.safetensors"}, "data": data, "output": {"dir": str(tmp_path)}})
    (tmp_path / "config.toml").write_text(resolved(config))
    card = model_card(RunReader(tmp_path).read(), "a", family, "a.safetensors", 1, ())
    front = YAML(typ="safe").load(card.split("---\n")[1])
    assert (front["pipeline_tag"], task in front["tags"]) == (task, True)
