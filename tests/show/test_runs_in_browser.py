"""Runs begun and followed in a real browser: from an empty folder to a LoRA, by two browsers, and through kills."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flame_train.quickstart.drawings import write_images
from flame_train.show.serve import HOST, listening
from flame_train.ui.queue_file import QUEUE
from tests.tiny_sdxl import write_tiny_sdxl

from .conftest import until, wait
from .test_acting import TOKEN
from .test_queue import STAND_IN

PROGRAM = [sys.executable, "-m", "flame_train"]


def text_of(page, place):
    return page.text_content(place) or "" if page.locator(place).count() else ""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.mark.proof  # a faster one does the same with a stand-in for the program
@pytest.mark.timeout(1800)
def test_from_an_empty_folder_to_a_lora(serve, open_page, root):
    port = serve(root, token=TOKEN, window=True, command=PROGRAM)
    page = open_page(f"http://127.0.0.1:{port}/?token={TOKEN}", strict=False)
    wait(page, "document.body.dataset.ready")
    page.click("#example")
    wait(page, "document.querySelector('#plan .facts')", 120)
    page.click("#start")

    # it says what it waits for, and is asked for samples once it trains
    page.wait_for_url("**/queue")
    seen = set()
    until(lambda: seen.add(text_of(page, "#queue .now")) or "\nstep 1/200" in text_of(page, "#queue .log"), 600)
    assert any(line.startswith("encoding") for line in seen)  # what comes first may be over before the page asks
    page.click("#queue a")
    wait(page, "document.querySelector('#acts button')")
    before = len(list(root.glob("example/run/samples/*.png")))
    page.click("#acts button:text('sample now')")
    until(lambda: len(list(root.glob("example/run/samples/*.png"))) > before, 300)
    page.click("#acts button:text('stop')")
    wait(page, "document.querySelector('#acts a.button')?.textContent.startsWith('continue from')", 120)
    until(lambda: "continue on cpu" in text_of(page, "#acts"), 120)
    until(lambda: "interrupted" in text_of(page, "#status"), 60)

    # it goes on with another rate, in a folder of its own
    page.click("#acts a:text('continue from it with changes')")
    wait(page, "document.body.dataset.ready")
    assert page.input_value("#key-train-continue_from") == str(root / "example" / "run")
    page.fill("#key-optimizer-lr", "3e-3")
    page.press("#key-optimizer-lr", "Tab")
    page.fill("#key-train-steps", "50")
    page.press("#key-train-steps", "Tab")
    wait(page, "document.querySelector('#toml').value.includes('steps = 50')")
    page.click("#start")
    page.wait_for_url("**/queue")
    until(lambda: "done" in text_of(page, "#queue li:last-child"), 900)
    page.click("#queue li:last-child a")
    wait(page, "document.querySelector('#acts a[download]')")
    assert "best by validation" in page.inner_text("#acts")
    with page.expect_download() as download:
        page.click("#acts a[download]:has-text('download lora.safetensors')")
    assert Path(download.value.path()).read_bytes() == (root / "example" / "run-2" / "lora.safetensors").read_bytes()
    assert "0.003" in (root / "example" / "run-2" / "config.toml").read_text()


def test_two_browsers_and_the_buttons_of_a_run(serve, open_page, root, small_base):
    """With a stand-in for the program, whose steps cost nothing."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed")
    (root / "stand_in.py").write_text(STAND_IN)
    (root / "base.safetensors").write_bytes(small_base.read_bytes())
    write_images(root / "photos", 12, 1)
    command = [sys.executable, "-I", "-S", str(root / "stand_in.py")]
    port = serve(root, token=TOKEN, window=True, devices=["cuda:0"], command=command)
    page = open_page(f"http://127.0.0.1:{port}/new?token={TOKEN}", strict=False)
    wait(page, "document.body.dataset.ready")
    page.click("#found button")
    wait(page, "document.querySelector('#toml').value")
    page.fill("#folder", str(root / "photos"))
    page.press("#folder", "Tab")
    wait(page, f"document.querySelector('#toml').value.includes('{root}/photos')")
    page.select_option("#device", "cuda")
    page.click("#start")
    page.wait_for_url("**/queue")
    wait(page, "document.querySelector('#queue .state.running')")
    wait(page, "document.querySelector('#queue .now').textContent.startsWith('hello from')")

    other = open_page(f"http://127.0.0.1:{port}/queue?token={TOKEN}", strict=False)
    wait(other, "document.body.dataset.acts === 'no'")
    assert "Another window acts; this one looks." in other.inner_text("#lease")
    wait(other, "document.querySelector('#queue button')")
    other.click("#queue button:text('stop')")
    wait(other, "document.querySelector('#told').textContent.includes('another window acts')")
    for width, scheme in ((1280, "light"), (390, "dark")):
        other.set_viewport_size({"width": width, "height": 900})
        other.emulate_media(color_scheme=scheme)
        wait(other, f"document.documentElement.scrollWidth <= {width}")
        assert [each["id"] for each in axe.Axe().run(other).response["violations"]] == []
    other.click("#lease button")
    wait(other, "document.body.dataset.acts === 'yes'")
    wait(page, "document.body.dataset.acts === 'no'")
    assert page.locator("#lease").is_visible()
    other.click("#queue button:text('stop')")
    wait(other, "document.querySelector('#queue .state.interrupted')")
    assert "stopped, with 130" in other.inner_text("#queue")
    other.click("#queue button:text('remove')")
    wait(other, "!document.querySelector('#queue li')")
    wait(page, "!document.querySelector('#queue li')")

    # what a run is called and says is text
    name = "<img src=x onerror='window.planted=1'>"
    (written,) = (file for file in root.glob("*.toml") if file.name != QUEUE)
    assert start(other, root, name, written.read_text()) == ""
    wait(other, "document.querySelector('#queue .now')?.textContent.startsWith('hello from <img')")
    (root / "runs" / name / "end").write_text("3")
    wait(other, "document.querySelector('#queue .bad')?.textContent === 'ended with 3 error: it went wrong'")
    assert name in other.inner_text("#queue")
    assert (other.evaluate("window.planted"), other.locator("img").count()) == (None, 0)


def test_a_run_is_opened_anew_from_its_page(serve, open_page, made, tmp_path):
    run = made("root/run").folder
    page = open_page(
        f"http://127.0.0.1:{serve(tmp_path / 'root', token=TOKEN, window=True)}/run?name=run&token={TOKEN}",
        strict=False,
    )
    wait(page, "document.querySelector('#acts a[download]')")
    assert page.locator("#acts button").count() == 0  # it is done
    for way, before in (("continue from it with changes", str(run)), ("clone", "")):
        page.click(f"#acts a:text('{way}')")
        wait(page, "document.body.dataset.ready")
        assert page.input_value("#key-train-continue_from") == before
        assert page.input_value("#key-output-dir") == f"{run}-2"
        assert page.input_value("#path") == f"{run}-2.toml"
        page.go_back()
        wait(page, "document.querySelector('#acts a[download]')")


def start(page, root, name, config):
    """Starts a run of another name as a page does. Returns what was refused."""
    config = re.sub(r'(?m)^dir = ".*"', lambda _: f'dir = "{root}/runs/{name}"', config)
    question = {"toml": config, "path": f"{root}/{re.sub('[^a-z]', '', name)}.toml", "device": "cuda", "force": True}
    return page.evaluate(
        """async (question) => { const { ask } = await import("/ui/ask.js");
        try { await ask("start", question); return ""; } catch (error) { return error.message; } }""",
        question,
    )


SERVER = """
import sys
from pathlib import Path
from flame_train.disk.roots import Roots
from flame_train.show.serve import serve
from flame_train.ui.app import Window
window = Window(Roots([Path(sys.argv[1])]), ["cuda:0", "cuda:1"], sys.argv[3:])
with window.queue.working():
    serve(window.app(), int(sys.argv[2]), False, print, token=True, changes=True)
"""
ON_CPU = """
import os, sys
words = sys.argv[1:]
at = words.index("--device") + 1
with open(os.path.dirname(words[words.index("--output") + 1]) + "/starts", "a") as starts:
    starts.write(words[words.index("--output") + 1].rpartition("/")[2] + " " + words[at] + "\\n")
words[at] = "cpu"
os.execv(sys.executable, [sys.executable, "-m", "flame_train", *words])
"""
"""Stands in for the program on a machine with GPUs: the program on the CPU, which says what GPU it was given."""


@pytest.mark.proof  # tests/show/test_queue.py kills at the same moments, with a stand-in for the program
@pytest.mark.timeout(1800)
def test_three_runs_on_two_gpus_while_the_server_is_killed_ten_times(open_page, root):
    write_tiny_sdxl(root / "base.safetensors")
    write_images(root / "photos", 12, 1)
    (root / "on_cpu.py").write_text(ON_CPU)
    with listening(0, HOST) as listener:
        port = listener.getsockname()[1]
    words = [sys.executable, "-c", SERVER, str(root), str(port), sys.executable, str(root / "on_cpu.py")]
    environment = os.environ | {"FLAME_TRAIN_TOKEN": TOKEN}

    def server():
        process = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment)
        assert process.stdout.readline()
        return process

    running = server()
    page = open_page(f"http://127.0.0.1:{port}/queue?token={TOKEN}", strict=False)
    for name in ("a", "b", "c"):
        config = f'[model]\ncheckpoint = "{root}/base.safetensors"\n[data]\npath = "{root}/photos"\nresolution = 96\n'
        config += (
            f'bucket_step = 32\ncache = "{root}/cache-{name}"\n[lora]\nrank = 2\nalpha = 2.0\n[train]\nsteps = 20\n'
        )
        config += f'precision = "fp32"\n[sample]\nevery = 0\n[output]\ndir = "{root}/runs/{name}"\n'
        assert start(page, root, name, config) == ""
    chosen = random.Random(7)
    for _ in range(10):
        time.sleep(chosen.uniform(0, 3))
        running.send_signal(signal.SIGKILL)
        running.communicate()
        running = server()
    until(lambda: page.inner_text("#queue").count("done") == 3, 900)
    assert sorted(line.split()[0] for line in (root / "runs" / "starts").read_text().splitlines()) == ["a", "b", "c"]
    assert {line.split()[1] for line in (root / "runs" / "starts").read_text().splitlines()} == {"cuda:0", "cuda:1"}
    for name in ("a", "b", "c"):
        run = root / "runs" / name
        assert (run / "lora.safetensors").is_file()
        assert len((run / "log.jsonl").read_text().splitlines()) == 20
    running.send_signal(signal.SIGINT)
    running.communicate()
