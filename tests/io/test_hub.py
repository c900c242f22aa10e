"""A hub id: what is fetched is what a diffusers folder is read for and no more; the network itself is stood in for."""

from __future__ import annotations

import hashlib
import shutil
import socket
import threading
from collections.abc import Iterator
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub as hub
import numpy as np
import pytest
from huggingface_hub import constants, hf_api
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image

import flame_train
import flame_train.io.hub as ours
from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.formats import to_kohya
from flame_train.config.load import problems_in
from flame_train.errors import ModelFileError
from flame_train.io.hub import fetch_path, fetching, path_of_setting, read_of, resolve_checkpoint
from flame_train.io.model_search import Found, searching
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.common.family import published_name
from flame_train.models.sdxl.names import lora_family
from flame_train.run.commands.stages import train
from tests.hub_store import hub_here

TOKEN = "hf_" + "x" * 34

READ = [
    "model_index.json",
    "scheduler/scheduler_config.json",
    "transformer/model-00001-of-00003.safetensors",
    "transformer/diffusion_pytorch_model.safetensors.index.json",
    "tokenizer/merges.txt",
    "tokenizer/vocab.json",
    "tokenizer_2/tokenizer.json",
    "tokenizer_3/spiece.model",
]


SPARED = [
    "flux1-dev.safetensors",
    "ae.safetensors",
    "text_encoders/t5xxl_fp16.safetensors",
    "unet/diffusion_pytorch_model.bin",
    "unet/diffusion_pytorch_model.fp16.safetensors",
    "text_encoder/model.fp16-00001-of-00002.safetensors",
    "README.md",
    "vae_decoder/model.onnx",
]
WHOLE = [
    "unet/diffusion_pytorch_model.safetensors",
    "text_encoder/model.safetensors",
    "vae/model.bf16.safetensors",
    "vae/model.fp16.safetensors",
]


@pytest.fixture
def hub_with(monkeypatch, tmp_path):
    """A hub with these files, or one that is out of reach; what was fetched of them, in order."""
    fetched = []

    def has(files, cached=False):
        def listed(name, token=None):
            if files is None:
                raise OSError("no network")
            return files

        def snapshot(name, allow_patterns=None, local_files_only=False, token=None):
            if local_files_only:
                if not cached:
                    raise LocalEntryNotFoundError("nothing kept")
                (tmp_path / "model.safetensors").touch()
                return str(tmp_path)
            fetched.append([f for f in files or [] if any(fnmatch(f, p) for p in allow_patterns or ["*"])])
            return str(tmp_path)

        monkeypatch.setattr(hub, "list_repo_files", listed)
        monkeypatch.setattr(hub, "snapshot_download", snapshot)
        return fetched

    return has


def test_what_is_read_is_fetched_and_no_more(hub_with, tmp_path):
    fetched = hub_with([*READ, *WHOLE, *SPARED])
    with fetching():
        assert resolve_checkpoint("hf:owner/model") == tmp_path
    assert [sorted(files) for files in fetched] == [sorted([*READ, *WHOLE])]


def test_weights_that_lie_in_no_component_are_all_there_is():
    assert read_of(["config.json", "model.safetensors", "model.fp16.safetensors"]) == [
        "config.json",
        "model.safetensors",
    ]
    assert read_of(["unet/model.fp16.safetensors", "x.safetensors"]) == ["unet/model.fp16.safetensors"]


def test_a_name_with_brackets_is_no_pattern(hub_with):
    fetched = hub_with(["unet/a[b].safetensors", "unet/ab.safetensors"])
    with fetching():
        resolve_checkpoint("hf:owner/brackets")
    assert fetched == [["unet/a[b].safetensors", "unet/ab.safetensors"]]


@pytest.mark.parametrize("name", ["owner/kept", "hf:owner/kept"])
@pytest.mark.parametrize("what", ["all", "headers", "nothing"])
def test_what_was_fetched_before_does_where_the_hub_is_out_of_reach(hub_with, tmp_path, name, what):
    fetched = hub_with(None, cached=True)
    with fetching(what):
        assert resolve_checkpoint(name) == tmp_path
    assert fetched == []


def test_what_the_hub_does_not_have_is_told_by_name(hub_with):
    hub_with(None)
    told = r"hf:owner/nothing: neither in the hub's local cache nor to be had from it .*no network"
    with fetching(), pytest.raises(ModelFileError, match=told):
        resolve_checkpoint("hf:owner/nothing")


def test_the_hub_is_asked_once_and_again_only_after_a_failure(hub_with, tmp_path):
    """Every part of a run asks where its checkpoint is: what the hub has may change meanwhile, or be out of reach."""
    hub_with(None)
    with fetching():
        with pytest.raises(ModelFileError, match="no network"):
            resolve_checkpoint("hf:owner/wanted-often")
        fetched = hub_with(READ)
        assert [resolve_checkpoint("hf:owner/wanted-often") for _ in range(3)] == [tmp_path] * 3
    assert len(fetched) == 1


def test_a_path_that_is_not_there_is_no_question_to_the_hub(hub_with):
    fetched = hub_with(READ)
    with fetching(), pytest.raises(ModelFileError, match=r"there is no such file, nor a model .* hf:models/sdxl-base$"):
        resolve_checkpoint("models/sdxl-base")
    assert fetched == []


@pytest.mark.parametrize(
    "name", ["hf:", "hf:name", "hf:a//c", "hf:../x/y", "hf:a/b/../c", "hf:owner/na me", "hf:/etc/passwd"]
)
def test_what_is_no_name_of_a_model_is_not_asked_for(hub_with, name):
    fetched = hub_with(READ)
    with fetching(), pytest.raises(ModelFileError, match="expected a model's name on the hub after hf:"):
        resolve_checkpoint(name)
    assert fetched == []


@pytest.fixture
def silent(monkeypatch, tmp_path):
    """An empty cache, a token, and any attempt to reach another machine noted."""
    tried: list[object] = []

    def refuse(*address, **named):
        tried.append(address)
        raise RuntimeError("no network in this test")  # of a kind that nobody tries again for

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return tried


@pytest.mark.parametrize("name", ["owner/not-here", "hf:owner/not-here", "models/sdxl-base", "nowhere.safetensors"])
def test_without_being_asked_nothing_is_sent_anywhere(silent, name):
    with pytest.raises(ModelFileError):
        resolve_checkpoint(name)
    assert silent == []


def test_being_asked_tries(silent):
    with fetching(), pytest.raises(ModelFileError):
        resolve_checkpoint("hf:owner/is-tried")
    assert silent


class Answer(BaseHTTPRequestHandler):
    """A hub that says where each request came from, and what with, and sends it on."""

    def do_GET(self) -> None:
        self.server.heard.append((self.path, self.headers.get("Authorization")))  # type: ignore[attr-defined]
        there = self.server.leads_to  # type: ignore[attr-defined]
        if there:
            self.send_response(302)
            self.send_header("Location", there + self.path)
        else:
            self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[list[ThreadingHTTPServer]]:
    """Two machines; the first sends whoever asks on to the second."""
    made = [ThreadingHTTPServer(("127.0.0.1", 0), Answer) for _ in range(2)]
    for server in made:
        server.heard, server.leads_to = [], ""  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
    made[0].leads_to = f"http://localhost:{made[1].server_port}"  # type: ignore[attr-defined]
    yield made
    for server in made:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("own", [True, False])
def test_a_token_is_sent_to_the_hubs_own_host_alone(servers, monkeypatch, tmp_path, caplog, own):
    """Neither to another endpoint, nor to where the hub sends one on to."""
    hub_server, other = servers
    endpoint = f"http://127.0.0.1:{hub_server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(hf_api.api, "endpoint", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    if own:
        monkeypatch.setattr(ours, "token_sent", lambda: None)
    ours._fetch_part.cache_clear()
    with fetching(), pytest.raises(ModelFileError) as caught:
        resolve_checkpoint("hf:owner/gated")
    assert {sent for _, sent in hub_server.heard} == {f"Bearer {TOKEN}" if own else None}
    assert other.heard
    assert {sent for _, sent in other.heard} == {None}
    assert TOKEN not in f"{caught.value} {caught.value.__cause__} {caplog.text}"


@pytest.mark.parametrize(
    ("endpoint", "sent"),
    [
        ("https://huggingface.co", None),
        ("https://hub-ci.huggingface.co", None),
        ("http://huggingface.co", False),
        ("https://huggingface.co.example.org", False),
        ("https://hf-mirror.example", False),
        ("", False),
    ],
)
def test_which_endpoints_are_the_hubs_own(monkeypatch, endpoint, sent):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    assert ours.token_sent() is sent


def test_a_token_that_a_library_repeats_is_not_printed(hub_with, monkeypatch):
    hub_with(None)

    def repeat(name, token=None):
        raise ValueError(f"Illegal header value b'Bearer {TOKEN}'")

    monkeypatch.setattr(hub, "list_repo_files", repeat)
    with fetching(), pytest.raises(ModelFileError, match="token") as caught:
        resolve_checkpoint("hf:owner/odd-token")
    assert TOKEN not in str(caught.value)
    assert caught.value.__cause__ is None


FILES = "hf:owner/small"
SMALL = Path(flame_train.__file__).parent / "models" / "common" / "assets" / "small_sdxl.safetensors"


@pytest.fixture
def store(monkeypatch, tmp_path):
    with hub_here(monkeypatch, tmp_path) as server:
        yield server


def put(folder, **files):
    for name, tensors in files.items():
        place = folder / f"{name.replace('__', '/')}.safetensors"
        place.parent.mkdir(parents=True, exist_ok=True)
        save_file(place, tensors, {"made": "here"})


WEIGHT = {"a.weight": np.ones((300, 400), np.float32)}


@pytest.mark.parametrize(
    ("name", "inner"),
    [("", "unet/model.safetensors"), ("/unet", "model.safetensors"), ("/unet/model.safetensors", "")],
)
def test_headers_alone_come_where_they_are_all_that_is_asked(store, name, inner):
    put(store.folder, unet__model=WEIGHT)
    (store.folder / "unet" / "config.json").write_text('{"norm_eps": 1e-5}')
    with fetching("headers"), SafetensorsFile(path_of_setting(FILES + name) / inner) as file:
        assert file.shapes == {"a.weight": (300, 400)}
        assert file.metadata == {"made": "here"}
        assert np.isnan(file.read("a.weight")).all()
    assert "model.safetensors" not in store.heard
    if name == "/unet":
        assert (placed_headers(FILES + name) / "config.json").read_text() == '{"norm_eps": 1e-5}'


def placed_headers(name):
    with fetching("headers"):
        return path_of_setting(name)


def test_a_long_header_takes_a_second_request(store):
    put(store.folder, model={f"layer.{i}.{'x' * 200}": np.ones(1, np.float32) for i in range(700)})
    with SafetensorsFile(placed_headers(FILES + "/model.safetensors")) as file:
        assert len(file.names) == 700


def test_values_that_a_format_is_read_by_are_not_made_up(store):
    put(store.folder, model={"marks": np.zeros(9, np.uint8)})
    told = r"only the header was fetched; .*hf download owner/small model.safe"
    path = placed_headers(FILES + "/model.safetensors")
    with SafetensorsFile(path) as file, pytest.raises(ModelFileError, match=told):
        file.read("marks")


def test_a_hub_that_sends_no_parts_is_not_asked_for_all(store):
    store.in_parts = False
    put(store.folder, model={"a": np.ones(1 << 20, np.float32)})
    with pytest.raises(ModelFileError, match=r"sends no part of a file.*hf download owner/small, or start without"):
        placed_headers(FILES)


def test_a_word_that_stands_for_a_file_is_answered_with_the_files(hub_with):
    """As where a published adapter is one of eight runs."""
    runs = [f"run-{i}/pytorch_lora_weights.safetensors" for i in range(8)]
    hub_with([*runs, "README.md"])
    with fetching(), pytest.raises(ModelFileError, match=f"it has no FILE; weights in it are {', '.join(runs)}\\)"):
        path_of_setting("hf:owner/runs/FILE")


@pytest.mark.parametrize("what", ["headers", "all"])
def test_a_file_that_a_model_lacks_is_told(store, what):
    put(store.folder, model=WEIGHT)
    with fetching(what), pytest.raises(ModelFileError, match=r"other\.safetensors: neither"):
        path_of_setting(FILES + "/other.safetensors")


def test_a_file_of_a_model_is_fetched_alone_and_kept(store):
    put(store.folder, model=WEIGHT, other=WEIGHT)
    (store.folder / "adapter_config.json").write_text("{}")
    assert fetch_path(FILES + "/model.safetensors").read_bytes() == (store.folder / "model.safetensors").read_bytes()
    assert sorted(store.heard) == ["adapter_config.json", "model.safetensors"]  # what is said of it beside it
    assert path_of_setting(FILES + "/model.safetensors").is_file()  # without the network
    with pytest.raises(ModelFileError, match=r"hf download owner/small other\.safe"):
        path_of_setting(FILES + "/other.safetensors")


def test_a_pipeline_of_which_a_part_was_fetched_is_not_taken_for_whole(store):
    put(store.folder, unet__model=WEIGHT, vae__model=WEIGHT)
    (store.folder / "model_index.json").write_text('{"unet": ["diffusers", "U"], "vae": ["diffusers", "V"]}')
    assert fetch_path(FILES + "/vae").is_dir()
    fetch_path(FILES + "/model_index.json")
    with pytest.raises(ModelFileError, match=r"hf download owner/small$"):
        path_of_setting(FILES)
    put(store.folder, unet__model__fp16=WEIGHT)
    (store.folder / "unet" / "model" / "fp16.safetensors").rename(store.folder / "unet" / "model.fp16.safetensors")
    ours._fetch_part.cache_clear()
    whole = fetch_path(FILES)
    assert "model.fp16.safetensors" not in store.heard  # which is spared, so the repository is not all there
    assert path_of_setting(FILES) == whole
    (whole / "unet" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    )
    with pytest.raises(ModelFileError, match=r"hf download owner/small$"):
        path_of_setting(FILES)


def test_a_dry_run_names_everything_on_the_hub_and_fetches_no_weights(store, tmp_path):
    """Checkpoint, VAE, a training adapter and the LoRA to begin with: planned as the same files of this machine are."""
    target = "input_blocks.4.1.transformer_blocks.0.attn2.to_k"
    store.folder.mkdir()
    shutil.copy(SMALL, store.folder / "base.safetensors")
    with SafetensorsFile(SMALL) as base:
        rows, columns = base.shapes[f"model.diffusion_model.{target}.weight"]
    factors = LoraFactors(np.ones((2, columns), np.float32), np.ones((rows, 2), np.float32), 2.0)
    save_file(store.folder / "lora.safetensors", to_kohya({"unet": {target: factors}}, lora_family()))
    images = tmp_path / "images"
    images.mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (96, 96), (9, 99, 200)).save(images / f"{name}.png")
        (images / f"{name}.txt").write_text("a caption")
    Image.new("L", (96, 96), 100).save(images / "a.mask.png")

    def planned(place):
        files = {"checkpoint": "base", "vae": "base", "training_adapter": "lora"}
        return train(
            {
                "model": {key: f"{place}/{file}.safetensors" for key, file in files.items()},
                "data": {"path": str(images), "resolution": 96, "bucket_step": 32, "masks": "files"},
                "lora": {
                    "from": f"{place}/lora.safetensors",
                    "targets": [target],
                    "rank": 2,
                    "alpha": 2.0,
                },
                "train": {"steps": 1, "precision": "fp32"},
                "output": {"dir": str(tmp_path / "run")},
            },
            [],
            "cpu",
            True,
        )

    found, expected = planned(FILES), planned(store.folder)
    assert found["checkpoint"] == f"{FILES}/base.safetensors"
    assert found["training_adapter"] == f"{FILES}/lora.safetensors"
    named_or_measured = ("checkpoint", "training_adapter", "free_host_memory_gib")
    found, expected = ({k: v for k, v in plan.items() if k not in named_or_measured} for plan in (found, expected))
    assert found == expected
    assert (found["masks"], found["images_without_a_mask"]) == (1, 1)
    assert store.heard == []
    told = [str(problem) for problem in problems_in({"data": {"path": FILES}})]
    assert any("data.path: expected a path of this machine, got a name on the hub" in line for line in told)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("hub/models--o--Z-Turbo/snapshots/abc", "models--o--z-turbo"),
        ("hub/models--o--Z-Turbo/snapshots/abc/transformer", "models--o--z-turbo transformer"),
        ("hub/models--o--z/snapshots/abc/Turbo.safetensors", "models--o--z turbo.safetensors"),
        ("turbo/snapshots/Base.safetensors", "base.safetensors"),
    ],
)
def test_a_part_of_a_repository_is_called_as_the_repository_too(path, name):
    """Whether a checkpoint is distilled, or is Kontext, may be told by its name alone."""
    assert published_name(Path(path)) == name


@pytest.mark.parametrize("what", ["headers", "all"])
def test_a_file_that_another_program_keeps_is_not_fetched(store, tmp_path, monkeypatch, what):
    """It is known by its bytes, whatever it is called, and without network by what the hub said before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    put(store.folder, model=WEIGHT)
    put(tmp_path / "ComfyUI", vae__model={"a.weight": 2 * WEIGHT["a.weight"]}, vae__mine=WEIGHT)
    mine = tmp_path / "ComfyUI" / "vae" / "mine.safetensors"
    digest = hashlib.sha256(mine.read_bytes()).hexdigest()[:12]
    with searching([str(tmp_path / "ComfyUI")]) as search:
        with fetching(what):
            assert path_of_setting(FILES + "/model.safetensors") == mine
        assert path_of_setting(FILES + "/model.safetensors") == mine
        assert search.found == [Found(FILES + "/model.safetensors", mine, f"its SHA-256 is that on the hub ({digest})")]
        assert store.heard == []
        mine.unlink()
        with fetching(what):
            assert path_of_setting(FILES + "/model.safetensors").name == "model.safetensors"
    assert store.heard == (["model.safetensors"] if what == "all" else [])
