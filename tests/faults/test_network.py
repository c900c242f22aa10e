"""What is not asked to fetch never uses the network: a hub and a proxy that nobody may speak to."""

from __future__ import annotations

import socket

import pytest

TOKEN = "hf_" + "x" * 34


@pytest.fixture
def listening(tmp_path):
    """A socket that stands for the hub and for every proxy, with the environment that leads to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        place = f"http://127.0.0.1:{server.getsockname()[1]}"
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), place)
        yield server, {"HF_ENDPOINT": place, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hub"), **proxies}


def assert_silent(server: socket.socket) -> None:
    with pytest.raises(BlockingIOError):
        server.accept()


@pytest.mark.parametrize(
    ("command", "name"), [("sdxl-lora", "owner/model"), ("cache", "models/sdxl-base"), ("dataset", "hf:owner/model")]
)
def test_a_dry_run_asks_nobody(job, listening, command, name):
    server, env = listening
    line = job.arguments(command, model__checkpoint=name)
    ended = job.program(*(["dataset", line[2]] if command == "dataset" else [*line, "--dry-run"]), env=env)
    assert ended.code == 3
    assert ("hf download owner/model" if name.startswith("hf:") else f"hf:{name}") in ended.complaint
    assert TOKEN not in ended.stdout + ended.stderr
    assert_silent(server)


@pytest.mark.parametrize("command", ["sdxl-lora", "cache", "sample"])
def test_a_path_that_is_not_there_asks_nobody(job, listening, command):
    server, env = listening
    line = job.arguments(command, model__checkpoint="models/sdxl-base")
    if command == "sample":
        line = ["sample", "-m", "models/sdxl-base", "-p", "x", "-o", str(job.folder / "x.png"), "--device", "cpu"]
    ended = job.program(*line, env=env)
    assert ended.code == 3
    assert "to fetch it from the hub: hf:models/sdxl-base" in ended.complaint
    assert_silent(server)


def test_a_whole_run_and_what_is_done_with_its_result_ask_nobody(job, world, program, listening):
    server, env = listening
    base, lora, out = str(world / "base.safetensors"), str(job.out / "lora.safetensors"), job.folder
    lines = [
        job.arguments("sdxl-lora"),
        ["inspect", lora],
        ["convert", lora, str(out / "c.safetensors"), "--to", "diffusers"],
        ["merge", base, lora, str(out / "m.safetensors")],
        ["init", "sdxl", "-o", str(out / "i.toml")],
        ["doctor", "--device", "cpu"],
    ]
    for line in lines:
        ended = program(*line, env=env)
        assert ended.code == 0, ended.stderr
    assert_silent(server)
