"""The window in a real browser: from an empty folder to a config that trains, what is wrong told at its place."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from PIL import Image

from flame_train.config.load import load

from .conftest import PLANTED, until

TOKEN = "a-token-of-the-window"


def wait(page, condition, seconds=60.0):
    until(lambda: page.evaluate(f"Boolean({condition})"), seconds)


@pytest.fixture
def window(serve, open_page, tmp_path):
    """The page of a new run, on an empty folder."""
    root = tmp_path / "root"
    root.mkdir()
    page = open_page(f"http://127.0.0.1:{serve(root, token=TOKEN, window=True)}/new?token={TOKEN}", strict=False)
    page.on("pageerror", lambda error: pytest.fail(f"script: {error}"))
    wait(page, "document.body.dataset.ready")
    return page, root


def photos(folder, names, size=(200, 120)):
    """Images of noise; all but the last have a caption."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    for name in names:
        Image.fromarray(rng.integers(0, 255, (size[1], size[0], 3), np.uint8)).save(folder / f"{name}.png")
        if name != names[-1]:
            (folder / f"{name}.txt").write_text(f"a photo {name}\n")


def test_a_run_is_set_up_from_an_empty_folder_without_typing_a_path(window):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed")
    page, root = window
    page.click("#example")  # its base is found below the folder afterwards
    wait(page, "document.querySelector('#plan .facts') && document.querySelector('#found button')")
    assert "200, 6.25 epochs" in page.inner_text("#plan")
    assert "210 images, 0 without a caption" in page.inner_text("#counts")
    photos(root / "photos", ["one", "two", "three"])
    page.reload()
    wait(page, "document.body.dataset.ready")
    assert page.input_value("#base").endswith("example/base.safetensors")
    page.click("#told button:text('begin anew')")  # the draft outlived the page
    wait(page, "!document.querySelector('#base').value")
    page.click("#found button")
    wait(page, "document.querySelector('#base-family').textContent === 'SDXL, told by its file'")
    page.fill("#name", "fox")
    page.select_option("#purpose", "style")
    page.click("#choose")
    page.click("dialog .folders button:text('photos (3 images)')")
    page.click("dialog button.primary")

    # captions are edited, and lie in files
    wait(page, "document.querySelectorAll('.sheet li').length === 3")
    assert page.inner_text("#counts") == "3 images, 1 without a caption, 0 captions without an image"
    page.fill("[aria-label='caption of three.png']", "a photo of a red fox\nin snow")
    page.press("[aria-label='caption of three.png']", "Tab")
    until(lambda: (root / "photos" / "three.txt").is_file())
    assert (root / "photos" / "three.txt").read_text() == "a photo of a red fox in snow\n"

    # a wrong value is told at its field, together with all others, by the loader's words
    for key, value in (("lora-rank", "0"), ("optimizer-lr", "fast")):
        page.fill(f"#key-{key}", value)
        page.press(f"#key-{key}", "Tab")
    wait(page, "document.querySelector('#key-optimizer-lr-error').textContent")
    assert page.inner_text("#key-lora-rank-error") == "expected an integer from 1 to 4096, got 0"
    assert page.inner_text("#key-optimizer-lr-error").startswith("expected a number > 0 and <= 10")
    assert page.get_attribute("#key-lora-rank", "aria-invalid") == "true"
    page.fill("#key-lora-rank", "8")
    page.press("#key-lora-rank", "Tab")
    page.click("[aria-label='default of optimizer.lr']")

    # what the plan refuses stands at its field too; the text and the fields are alive both
    wait(page, "document.querySelector('#key-data-path-error').textContent.includes('below 256 px')")
    page.fill("#toml", page.input_value("#toml").replace("[data]\n", "[data]\nresolution = 96\n"))
    wait(page, "document.querySelector('#key-data-resolution').value === '96'")
    wait(page, "document.querySelector('#plan .facts')")
    told = page.inner_text("#plan")
    assert "2000" in told
    assert "GiB" in told
    assert "128x64, " in page.inner_text(".sheet")

    for width, scheme in ((1280, "light"), (390, "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        wait(page, f"document.documentElement.scrollWidth <= {width}")
        assert [each["id"] for each in axe.Axe().run(page).response["violations"]] == []

    page.click("#write")
    wait(page, "document.querySelector('#written code')")
    config = load(str(root / "fox.toml"))
    assert (config.lora.rank, config.data.resolution, config.output.name) == (8, 96, "fox")
    assert config.data.path == str(root / "photos")
    assert f"flame-train train {root / 'fox.toml'}" in page.inner_text("#written code")


def test_another_trainers_config_is_dropped_onto_the_page(window):
    page, _ = window
    text = 'pretrained_model_name_or_path = "base.safetensors"\nnetwork_dim = 24\nmax_train_steps = 700\n'
    text += 'network_module = "networks.lora"\nlearning_rate = 1e-4\noptimizer_type = "AdamW"\nnoise_offset = "x"\n'
    page.evaluate(
        """(text) => { const data = new DataTransfer(); data.items.add(new File([text], "fox.toml"));
        document.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })); }""",
        text,
    )
    wait(page, "document.querySelector('#told select')")
    page.select_option("#told select", "sdxl")
    wait(page, "document.querySelector('#key-lora-rank').value === '24'")
    wait(page, "document.querySelector('#told').textContent.startsWith('fox.toml: a config of sd-scripts.')")
    assert "noise_offset" in page.inner_text("#told")
    assert "12 keys were carried over, 1 without a counterpart, 2 still to be set" in page.inner_text("#told")
    assert page.input_value("#purpose") == page.input_value("#card") == ""
    assert page.input_value("#key-train-steps") == "700"

    # another name changes the name alone; what is typed stands also while an answer is under way
    page.fill("#name", "bear")
    page.press("#name", "Tab")
    wait(page, "document.querySelector('#toml').value.includes('bear')")
    assert page.input_value("#key-lora-rank") == "24"
    page.evaluate(
        """async () => { const rank = document.querySelector("#key-lora-rank"), toml = document.querySelector("#toml");
        rank.value = "12"; rank.dispatchEvent(new Event("change")); for (let i = 0; i < 9; i++) await null;
        toml.value += "\\n# typed\\n"; toml.dispatchEvent(new Event("input")); }"""
    )
    wait(page, "document.querySelector('#toml').value.includes('rank = 12')")
    assert "# typed" in page.input_value("#toml")


def test_a_planted_script_in_captions_names_and_values_is_seen_as_text(window, small_base):
    page, root = window
    name = "<img src=x onerror='window.planted=1'>"
    for folder in ("photos", "before", name):
        photos(root / folder, ["one", name])
    (root / "photos" / "one.txt").write_text(PLANTED)
    shutil.copy(small_base, root / f"{name}.safetensors")
    Image.new("L", (200, 120), 255).save(root / "photos" / "one.mask.png")
    page.reload()
    wait(page, "document.querySelector('#found button')")
    page.click("#choose")
    wait(page, "document.querySelector('dialog li')")
    assert name in page.inner_text("dialog")
    page.click("dialog .buttons button:text('cancel')")
    page.click("#found button")
    wait(page, "!document.querySelector('#settings').hidden")
    data = f'[data]\npath = "{root}/photos"\nmasks = "files"\ncontrol = ["{root}/before"]\nresolution = 96\n'
    page.fill("#toml", f'{data}[lora]\nkind = "{name}"\n["<script>window.planted=1</script>"]\n')
    wait(page, "document.querySelectorAll('.sheet li').length === 2")
    assert page.input_value("[aria-label='caption of one.png']") == PLANTED
    assert page.locator(".sheet img").count() == 5  # two images, their control images, a mask
    wait(page, "document.querySelector('#plan .problems')")
    assert name in page.inner_text("#plan") + page.inner_text("#fields")
    page.wait_for_load_state("networkidle")
    assert page.evaluate("window.planted") is None
    assert page.locator("img[src=x], [onerror]").count() == 0
