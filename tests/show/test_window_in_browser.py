"""The window in a real browser: from an empty folder to a config that trains, what is wrong told at its place."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from PIL import Image

from flame_train.config.load import load
from tests.hub_store import hub_here

from .conftest import PLANTED, until, wait

TOKEN = "a-token-of-the-window"


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
    page.click("#write")
    wait(page, "document.querySelector('#written .bad')")
    page.fill("#find", "lr")  # what is called so comes first
    assert page.locator("#fields label:visible").first.inner_text() == "Peak learning rate\noptimizer.lr"
    page.click("[aria-label='default of optimizer.lr']")
    page.fill("#find", "")
    page.fill("#key-lora-rank", "8")
    page.press("#key-lora-rank", "Tab")
    wait(page, "!document.querySelector('#written').textContent")  # what was refused is mended

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
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#written button:text('copy')")
    wait(page, "document.querySelector('#written button').textContent === 'copied'")

    # another file is not replaced but by a click on a button that names it
    page.fill("#key-lora-rank", "4")
    page.press("#key-lora-rank", "Tab")
    wait(page, "document.querySelector('#written').textContent.startsWith('Changed since')")
    page.click("#write")
    wait(page, "document.querySelector('#written button')")
    assert "exists already" in page.inner_text("#written")
    page.fill("#path", f"{root}/bear.toml")
    assert page.inner_text("#written") == ""
    page.fill("#path", f"{root}/fox.toml")
    page.click("#write")
    page.click("#written button:text('replace it')")
    wait(page, "document.querySelector('#written code')")
    assert (load(str(root / "fox.toml")).lora.rank, (root / "bear.toml").exists()) == (4, False)


def test_another_trainers_config_is_dropped_onto_the_page(window):
    page, _ = window
    text = 'pretrained_model_name_or_path = "base.safetensors"\nnetwork_dim = 24\nmax_train_steps = 700\n'
    text += 'network_module = "networks.lora"\nlearning_rate = 1e-4\noptimizer_type = "AdamW"\nnoise_offset = "x"\n'
    page.evaluate(DROP, text)
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


def test_a_caption_lies_in_the_set_that_it_was_read_from_and_an_old_plan_is_marked(window):
    page, root = window
    sets = "[data]\nresolution = 96\n"
    for name in ("one", "other"):
        photos(root / name, [f"{name}-{number}" for number in range(10)])
        sets += f'[[data.sets]]\npath = "{root}/{name}"\n'
    page.evaluate(DROP, sets)
    wait(page, "document.querySelector('#sheet select')")
    assert page.locator(".sheet li:visible").count() == 8
    page.select_option("#sheet select", "1")
    wait(page, "document.querySelector('.sheet p.mono')?.textContent === 'other-0.png'")
    page.click("#sheet button:text('show all 10')")
    assert page.locator(".sheet li:visible").count() == 10
    page.evaluate(
        """(sets) => { const caption = document.querySelector("[aria-label='caption of other-9.png']");
        caption.value = "a fox"; const toml = document.querySelector("#toml"); toml.value = sets;
        toml.dispatchEvent(new Event("input")); caption.dispatchEvent(new Event("change")); }""",
        sets.rpartition("[[")[0],
    )
    until(lambda: (root / "other" / "other-9.txt").is_file())
    assert not (root / "one" / "other-9.txt").exists()
    wait(page, "document.querySelector('.sheet p.mono')?.textContent === 'one-0.png'")

    held = []
    wait(page, "document.querySelector('#plan .problems')")
    page.route("**/ask/plan", lambda route: held.append(route))
    page.fill("#toml", page.input_value("#toml") + "# more\n")
    wait(page, "document.querySelector('#plan').getAttribute('aria-busy') === 'true'")
    wait(page, "getComputedStyle(document.querySelector('#plan > *')).opacity === '0.4'")
    until(lambda: page.evaluate("1") and held)
    held[0].continue_()
    wait(page, "document.querySelector('#plan').getAttribute('aria-busy') === 'false'")


DROP = """(text) => { const data = new DataTransfer(); data.items.add(new File([text], "fox.toml"));
document.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })); }"""


def test_the_hub_is_asked_for_a_base_once_the_user_says_so(window, small_base, monkeypatch, tmp_path):
    page, root = window
    photos(root / "photos", ["one", "two", "three"])
    (root / "photos" / "three.txt").write_text("a photo\n")
    with hub_here(monkeypatch, tmp_path) as hub:
        hub.folder.mkdir()
        shutil.copy(small_base, hub.folder / "base.safetensors")
        text = f'[data]\npath = "{root}/photos"\nresolution = 96\nbucket_step = 32\n[output]\ndir = "{root}/run"\n'
        page.evaluate(DROP, f'[model]\ncheckpoint = "hf:owner/small/base.safetensors"\n{text}')
        wait(page, "document.querySelector('#plan .problems')")  # of a file that somebody wrote, nothing is asked
        assert "is not in the hub's local cache" in page.inner_text("#base-family") + page.inner_text("#plan")
        assert hub.asked == []
        page.click("#base-family button:text('ask the hub')")
        wait(page, "document.querySelector('#base-family').textContent === 'SDXL, told by its file'")
        wait(page, "document.querySelector('#plan .facts')")
        page.click("#example")  # and a name that is typed is asked for too
        wait(page, "document.querySelector('#told').textContent.includes('an example lies in')")
        page.fill("#base", "hf:owner/other")
        page.press("#base", "Tab")
        wait(page, "document.querySelector('#base-family').className === 'error'")
        assert "check the name" in page.inner_text("#base-family")
        page.fill("#base", "hf:owner/small/base.safetensors")
        page.press("#base", "Tab")
        wait(page, "document.querySelector('#base-family').textContent === 'SDXL, told by its file'")
        wait(page, "document.querySelector('#toml').value.includes('hf:owner/small')")
        assert "base.safetensors" not in hub.heard  # its header alone came


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
