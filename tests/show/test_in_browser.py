"""The pages in a real browser: what is shown, by keyboard too, and that no text of a run ever becomes a script."""

from __future__ import annotations

import io
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from flame_train.data.clip_files import sample_bytes
from flame_train.data.grid import grid

from .conftest import PLANTED, PROMPTS, colour, until_seen, wait

LOADED = "typeof state === 'object' && state.digest && document.querySelector('#dataset tbody tr')"
PHONE = 8000  # pixels of height


def url(port, path="/"):
    return f"http://127.0.0.1:{port}{path}"


def loaded(page):
    wait(page, LOADED)
    return page


def colour_of(page, selector):
    """The colour in the middle of an image as the browser shows it."""
    draw = """(image) => { const canvas = document.createElement("canvas"); canvas.width = canvas.height = 1;
      const context = canvas.getContext("2d");
      context.drawImage(image, image.naturalWidth / 2, image.naturalHeight / 2, 1, 1, 0, 0, 1, 1);
      return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3); }"""
    wait(page, f"document.querySelector({selector!r})?.complete && document.querySelector({selector!r}).naturalWidth")
    return page.eval_on_selector(selector, draw)


def alike(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) < 12  # JPEG


# ---- a planted script --------------------------------------------------------------------------------------


def test_a_planted_script_does_nothing_and_is_seen_as_text(made, serve, open_page, tmp_path):
    """In a prompt, a caption, the names of a run and of an optimizer's figure: on every page."""
    name = "<img src=x onerror='window.planted=1'>"
    run, _ = made(name), made("other")
    log = run.folder / "log.jsonl"
    log.write_text(log.read_text().replace('"d":', '"<img src=x onerror=window.planted=1>":'))
    port = serve(tmp_path)
    page = open_page(url(port))
    for path in ("list", "run", "compare", "report"):
        if path == "run":
            page.get_by_role("link", name=name).click()
            loaded(page)
            assert PLANTED in page.inner_text("#dataset")
        elif path == "compare":
            page.goto(url(port))
            for box in page.get_by_role("checkbox").all():
                box.check()
            page.get_by_role("button", name="compare the chosen runs").click()
            page.wait_for_selector("#curves svg.chart")
        elif path == "report":
            page.goto(run.report().as_uri())
        if path != "report":
            assert name in page.inner_text("body")
        page.wait_for_load_state("networkidle")
        assert page.evaluate("window.planted") is None
        assert page.locator("img[src=x], [onerror]").count() == 0
        assert path == "list" or PLANTED in page.inner_text("#samples")


@pytest.mark.parametrize("live", [True, False])
def test_a_script_that_got_into_a_page_would_not_run(made, serve, open_page, live):
    """Beside the escaping: the browser is told to run no script but ours."""
    run = made()
    page = open_page(url(serve(run.folder)) if live else run.report().as_uri(), strict=False)
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.bad = 1'}))")
    assert page.evaluate("window.bad") is None


# ---- what is shown -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [True, False])
def test_samples_that_are_clips_play(made, serve, open_page, live):
    """In the table and alone: each shows the white and the black frames, one after the other."""
    run = made()
    clips = [np.repeat(np.array([[[255] * 3], [[0] * 3]], np.uint8)[:, None], 64, 2).repeat(64, 1).copy()] * 3
    (run.folder / "samples" / "step-000050.webp").write_bytes(sample_bytes(grid(clips), 5))
    page = open_page(url(serve(run.folder)) if live else run.report().as_uri())
    page.wait_for_selector("#samples tbody tr[data-step='50'] img")
    for place in ("#samples tbody tr[data-step='50'] img", "dialog[open] img"):
        image, seen = page.locator(place).first, set()

        def both(image=image, seen=seen):
            with Image.open(io.BytesIO(image.screenshot())) as shot:
                seen.add(shot.convert("L").getpixel((shot.width // 2, shot.height // 2)) > 128)
            return len(seen) == 2

        if place.startswith("dialog"):
            page.locator("#samples tbody tr[data-step='50'] button.zoom").first.click()
            page.wait_for_selector(place)
        until_seen(both)


@pytest.mark.parametrize("live", [True, False])
def test_it_fits_every_window_follows_the_scheme_and_has_no_barrier(made, serve, open_page, live):
    """A phone has no word broken but those that are longer than its line; axe-core finds nothing."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    run = made()
    run.draw(0, base=True)
    page = open_page(url(serve(run.folder)) if live else run.report().as_uri())
    page.wait_for_selector("#dataset tbody tr")
    for width, scheme in ((1600, "light"), (1280, "dark"), (390, "dark"), (390, "light")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        wait(page, f"document.documentElement.scrollWidth <= {width}")
        back, ink = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
        light = [sum(map(int, each[4:-1].split(","))) for each in (back, ink)]
        assert (light[0] > light[1]) == (scheme == "light")
        assert abs(light[0] - light[1]) > 500  # of 765
        if (width, scheme) in ((1600, "light"), (390, "dark")):
            assert axe.Axe().run(page).response["violations"] == []
        page.evaluate("scrollTo(0, 2000)")
        assert page.evaluate("document.querySelector('h1').getBoundingClientRect().top") >= 0
        page.evaluate("scrollTo(0, 0)")
    assert page.evaluate("document.documentElement.scrollHeight") < PHONE
    assert page.evaluate(BROKEN) == []


BROKEN = """() => { const broken = [], range = document.createRange();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode())
    for (const word of text.data.matchAll(/[\\p{L}\\p{N}]{2,20}/gu)) {
      range.setStart(text, word.index), range.setEnd(text, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((each) => each.top)).size > 1) broken.push(word[0]);
    }
  return broken; }"""
"""Words of at most 20 letters that stand in two lines."""


def test_charts_are_read_by_keys_and_lead_to_samples_and_file(made, serve, open_page):
    run = made()
    (run.folder / "run.best.safetensors").write_bytes(b"the best")
    page = loaded(open_page(url(serve(run.folder))))
    assert "peak memory\n3.0 GiB" in page.inner_text("#summary")
    assert "40 of 80" in page.inner_text("#status")
    assert page.inner_text("#chart-validation").splitlines()[0] == "Validation loss"
    assert page.text_content("#chart-validation text.best") == "best 0.225 at step 40"
    page.focus("#chart-loss svg")
    page.keyboard.press("Home")
    for step in (1, 2, 3):
        values = re.match(rf"step {step}: each step (\S+), smoothed", page.text_content("#chart-loss .at"))
        assert float(values[1]) == pytest.approx(0.5 / step + 0.1 * (step % 3), rel=2e-3)
        page.keyboard.press("ArrowRight")
    page.focus("#chart-validation svg")
    page.keyboard.press("Enter")
    links = page.locator("#chart-validation .at a")
    assert links.all_text_contents() == ["samples of step 40", "run.best.safetensors"]
    page.focus("#chart-validation svg")
    page.keyboard.press("Home")
    page.locator("#chart-validation .at a").first.press("Enter")
    assert page.evaluate("document.activeElement.querySelector('img').alt") == f"step 10: {PROMPTS[0]}"
    chart = page.locator("#chart-loss svg.chart")
    chart.click(position={"x": chart.bounding_box()["width"] * 0.9, "y": 50})
    assert "samples of step 40" in page.inner_text("#chart-loss .at")


def test_the_range_and_the_axis_of_charts_are_chosen(made, serve, open_page):
    page = loaded(open_page(url(serve(made().folder))))
    ends = "document.querySelector('#chart-validation svg').dataset.y.split(' ').map(Number)"
    low, high = page.evaluate(ends)
    assert 0.1 < low <= 0.225 < 0.3 <= high < 0.4  # the values are 0.225 to 0.3
    page.get_by_label("values").select_option("zero")
    wait(page, f"({ends})[0] === 0")
    page.get_by_label("values").select_option("log")
    wait(page, "document.querySelector('#chart-loss svg').dataset.log === ''")
    page.get_by_label("from step").fill("31")
    page.get_by_label("from step").press("Enter")
    wait(page, "document.querySelectorAll('#chart-validation circle.c0').length === 1")


@pytest.mark.parametrize("live", [True, False])
def test_arrow_keys_walk_the_samples_on_the_page_and_enlarged(made, serve, open_page, live):
    run = made()
    run.draw(0, base=True)
    page = open_page(url(serve(run.folder)) if live else run.report().as_uri())
    names = ["step 40", "step 30", "step 20", "step 10", "step 0", "step 0, the base"]
    assert page.locator("#samples tbody th").all_inner_texts() == names
    assert page.locator("#samples .zoom[tabindex='0']").count() == 1
    page.focus("#samples .zoom[tabindex='0']")
    page.keyboard.press("ArrowRight")
    shown = [".pair figure:nth-child(1)", ".pair figure:nth-child(2)"]
    assert [page.inner_text(each) for each in shown] == ["step 0", "step 40"]
    assert page.inner_text(".stage > p") == PROMPTS[1]
    assert alike(colour_of(page, f"{shown[0]} img"), colour(0, 1))
    assert alike(colour_of(page, f"{shown[1]} img"), colour(40, 1))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("dialog p") == f"step 20: {PROMPTS[2]}"
    assert alike(colour_of(page, "dialog img"), colour(20, 2))
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    wait(page, f"document.activeElement.querySelector('img')?.alt === {json.dumps(f'step 20: {PROMPTS[2]}')}")
    page.focus("#when")
    page.keyboard.press("Home")
    assert page.inner_text(shown[1]) == "step 0, the base"
    page.focus("#later")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.inner_text(shown[1]) == "step 10"
    page.focus("#when")
    page.keyboard.press("Home")
    assert alike(colour_of(page, f"{shown[1]} img"), (9, 9, 9))


def test_tab_reaches_everything_that_can_be_done(made, serve, open_page):
    page = loaded(open_page(url(serve(made().folder))))
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("(e => e.id || e.classList[0] || e.tagName)(document.activeElement)"))
        assert page.evaluate("document.activeElement === document.body || document.activeElement.checkVisibility()")
    assert {
        "skip",
        "brand",
        "smoothing",
        "axis",
        "first",
        "when",
        "zoom",
        "chart",
        "SUMMARY",
        "INPUT",
        "SELECT",
    } <= seen


def test_the_dataset_is_found_and_ordered(made, serve, open_page):
    page = loaded(open_page(url(serve(made().folder))))
    assert page.inner_text("#dataset tbody tr:first-child td:nth-child(2)").startswith("a.png")
    page.get_by_label("order").select_option("lowest")
    wait(page, "!document.querySelector('#dataset tbody').textContent.includes('a.png')")
    page.get_by_label("find images by file or caption").fill("image 200")
    wait(page, "document.querySelectorAll('#dataset tbody tr').length === 1")
    row = page.inner_text("#dataset tbody tr")
    assert "200x100 in 64x64" in row
    assert "page 1 of 1: 1 images" in page.inner_text("#dataset .pager")
    assert "right 64 px; 50% kept" in row
    page.get_by_label("find images by file or caption").fill("A.MASK")
    page.wait_for_selector("#dataset .thumb")
    assert "mask: a.mask.png" in page.inner_text("#dataset tbody tr")
    thumb = page.eval_on_selector("#dataset .thumb", "e => getComputedStyle(e).backgroundImage")
    assert "/sheet?" in thumb


# ---- while a run goes on -----------------------------------------------------------------------------------


def test_the_page_follows_a_run_and_keeps_what_the_reader_does(made, serve, open_page):
    run = made()
    page = loaded(open_page(url(serve(run.folder))))
    page.eval_on_selector("#config details", "e => { e.open = true; }")
    page.focus("#samples .zoom[tabindex='0']")
    page.keyboard.press("ArrowRight")
    for step in range(41, 51):
        run.append(step)
    run.draw(50)
    page.get_by_role("link", name="log.jsonl").focus()
    page.evaluate("ask()")  # not to wait for the time at which it does so by itself
    wait(page, "document.querySelector('#status').innerText.includes('50 of 80')")
    assert page.evaluate("document.activeElement.textContent") == "log.jsonl"
    wait(page, "document.querySelectorAll('#samples tbody tr').length === 6")
    assert page.eval_on_selector("#config details", "e => e.open")
    assert page.inner_text(".pair figure:nth-child(2)") == "step 50"
    assert page.inner_text(".stage > p") == PROMPTS[1]


def test_a_run_whose_folder_is_gone_is_told(made, serve, open_page, tmp_path):
    made("other")
    run = made()
    page = loaded(open_page(url(serve(tmp_path), "/run?name=run"), strict=False))
    shutil.rmtree(run.folder)
    page.get_by_label("smoothing").focus()
    page.keyboard.press("ArrowLeft")
    wait(page, "document.querySelector('#told').className === 'lost'")
    assert "what is shown may be old" in page.inner_text("#told")
    assert "40 of 80" in page.inner_text("#status")


def test_runs_are_compared(made, serve, open_page, tmp_path):
    made("one", lr=1e-4)
    other = made("two", steps=30, lr=3e-4).folder / "config.toml"
    other.write_text(other.read_text().replace('"a house on a hill"', '"a hill"'))
    page = open_page(url(serve(tmp_path)))
    page.get_by_label("compare one").focus()
    page.keyboard.press("Space")
    page.get_by_label("compare two").check()
    page.get_by_role("button", name="compare the chosen runs").press("Enter")
    page.wait_for_selector("#chart-loss svg")
    lines = page.locator("#chart-loss polyline").evaluate_all("all => all.map(e => [e.dataset.label, e.points.length])")
    assert lines == [["one", 40], ["two", 30]]
    assert page.locator("#plots .legend span").all_inner_texts() == ["one", "two"]
    config = page.inner_text("#config")
    assert "optimizer.lr" in config
    assert "0.0003" in config
    assert "train.seed" not in config
    assert page.locator("#samples tbody tr").count() == 2
    assert page.locator("#samples thead th").all_inner_texts() == list(PROMPTS[:2])
    assert "2 of 4 prompts are of one run alone" in page.inner_text("#samples")


def test_the_list_of_runs_is_sorted_by_its_heads(made, serve, open_page, tmp_path):
    for name, lr in (("one", 3e-4), ("two", 1e-4), ("three", 2e-3)):
        made(name, steps=10, lr=lr)
    page = open_page(url(serve(tmp_path)))
    page.get_by_role("button", name="lr").press("Enter")
    assert page.locator("#runs tbody th").all_inner_texts() == ["two", "one", "three"]
    page.get_by_role("button", name="lr").press("Enter")
    assert page.locator("#runs tbody th").all_inner_texts() == ["three", "one", "two"]


def test_the_report_shows_its_curves_samples_and_texts_without_a_script(made, open_page):
    page = open_page(made().report().as_uri(), script=False)
    assert page.locator("#curves svg.chart").count() >= 9
    assert page.locator("#samples tbody img").count() == 15
    assert PLANTED in page.inner_text("#dataset")
