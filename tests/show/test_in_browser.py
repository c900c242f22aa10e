"""The pages in a real browser: what is shown, by keyboard too, and that no text of a run ever becomes a script."""

from __future__ import annotations

import shutil

import pytest

from .conftest import PLANTED, PROMPTS, colour, until

LOADED = (
    "document.querySelectorAll('#curves .js-plotly-plot').length >= 9 && document.querySelector('#dataset tbody tr')"
)


def url(port, path="/"):
    return f"http://127.0.0.1:{port}{path}"


def wait(page, condition):
    """Waits until JavaScript is true. Playwright's own waiting evaluates text in the page, which the page forbids."""
    until(lambda: page.evaluate(f"Boolean({condition})"))


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
            page.wait_for_selector("#curves .js-plotly-plot")
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
def test_it_fits_the_window_and_follows_the_scheme(made, serve, open_page, live):
    run = made()
    page = open_page(url(serve(run.folder)) if live else run.report().as_uri())
    page.wait_for_selector("#dataset tbody tr")
    for width, scheme in ((1280, "light"), (1280, "dark"), (390, "dark"), (390, "light")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        wait(page, f"document.documentElement.scrollWidth <= {width}")
        back, ink = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
        light = [sum(map(int, each[4:-1].split(","))) for each in (back, ink)]
        assert (light[0] > light[1]) == (scheme == "light")
        assert abs(light[0] - light[1]) > 500  # of 765


def test_the_curves_are_those_of_the_log(made, serve, open_page):
    page = loaded(open_page(url(serve(made().folder))))
    lines = page.evaluate("document.querySelector('#chart-loss .plotly-chart').data.map(d => [...d.y])")
    assert lines[0] == pytest.approx([0.5 / step + 0.1 * (step % 3) for step in range(1, 41)])
    assert page.evaluate("document.querySelector('#chart-memory .plotly-chart').data[0].y[0]") == 3.0
    assert page.evaluate("document.querySelector('#chart-validation .plotly-chart').data.length") == 3
    assert "40 of 80" in page.inner_text("#summary")


@pytest.mark.parametrize("live", [True, False])
def test_samples_have_a_slider_and_a_zoom_that_the_keyboard_moves(made, serve, open_page, live):
    run = made()
    page = open_page(url(serve(run.folder)) if live else run.report().as_uri())
    page.wait_for_selector("#samples .viewer select")
    page.select_option("#which", "1")
    assert alike(colour_of(page, ".pair figure:nth-child(1) img"), colour(0, 1))
    assert alike(colour_of(page, ".pair figure:nth-child(2) img"), colour(40, 1))
    page.focus("#when")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text(".pair figure:nth-child(2)") == "step 20"
    assert alike(colour_of(page, ".pair figure:nth-child(2) img"), colour(20, 1))
    page.focus("#samples tbody tr:nth-child(2) td:nth-of-type(1) button")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("dialog p") == f"step 20: {PROMPTS[1]}"
    assert alike(colour_of(page, "dialog img"), colour(20, 1))
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    focused = page.evaluate("Object.values(document.activeElement.querySelector('img').dataset).slice(-2)")
    assert set(focused) == {"10", "1"}


def test_tab_reaches_everything_that_can_be_done(made, serve, open_page):
    page = loaded(open_page(url(serve(made().folder))))
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("(e => e.id || e.className || e.tagName)(document.activeElement)"))
        assert page.evaluate("document.activeElement === document.body || document.activeElement.checkVisibility()")
    assert {"skip", "smoothing", "logarithmic", "which", "when", "scroll", "zoom"} <= seen


def test_the_dataset_is_found_and_ordered(made, serve, open_page):
    page = loaded(open_page(url(serve(made().folder))))
    assert page.inner_text("#dataset tbody tr:first-child td:nth-child(2)").startswith("a.png")
    page.get_by_label("order").select_option("lowest")
    wait(page, "!document.querySelector('#dataset tbody').textContent.includes('a.png')")
    page.get_by_label("find images by file or caption").fill("image 200")
    wait(page, "document.querySelectorAll('#dataset tbody tr').length === 1")
    row = page.inner_text("#dataset tbody tr")
    assert "200x100 in 64x64" in row
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
    page.select_option("#which", "2")
    for step in range(41, 51):
        run.append(step)
    run.draw(50)
    page.get_by_role("link", name="log.jsonl").focus()
    page.evaluate("ask()")  # not to wait for the time at which it does so by itself
    wait(page, "document.querySelector('#summary').innerText.includes('50 of 80')")
    assert page.evaluate("document.activeElement.textContent") == "log.jsonl"
    wait(page, "document.querySelectorAll('#samples tbody tr').length === 6")
    assert page.eval_on_selector("#config details", "e => e.open")
    assert page.input_value("#which") == "2"
    assert page.inner_text(".pair figure:nth-child(2)") == "step 50"


def test_a_run_whose_folder_is_gone_is_told(made, serve, open_page, tmp_path):
    made("other")
    run = made()
    page = loaded(open_page(url(serve(tmp_path), "/run?name=run"), strict=False))
    shutil.rmtree(run.folder)
    page.get_by_label("smoothing").focus()
    page.keyboard.press("ArrowLeft")
    wait(page, "document.querySelector('#told').className === 'lost'")
    assert "what is shown may be old" in page.inner_text("#told")
    assert "40 of 80" in page.inner_text("#summary")


def test_runs_are_compared(made, serve, open_page, tmp_path):
    made("one", lr=1e-4)
    made("two", steps=30, lr=3e-4)
    page = open_page(url(serve(tmp_path)))
    page.get_by_label("compare one").focus()
    page.keyboard.press("Space")
    page.get_by_label("compare two").check()
    page.get_by_role("button", name="compare the chosen runs").press("Enter")
    page.wait_for_selector("#chart-loss .js-plotly-plot, #chart-loss.js-plotly-plot")
    names = page.evaluate("document.querySelector('#chart-loss .plotly-chart').data.map(d => [d.name, d.x.length])")
    assert names == [["one", 40], ["two", 30]]
    config = page.inner_text("#config")
    assert "optimizer.lr" in config
    assert "0.0003" in config
    assert "train.seed" not in config
    assert page.locator("#samples tbody tr").count() == 2


def test_the_report_shows_its_curves_samples_and_texts_without_a_script(made, open_page):
    page = open_page(made().report().as_uri(), script=False)
    assert page.locator("#curves svg.chart").count() >= 9
    assert page.locator("#samples tbody img").count() == 15
    assert PLANTED in page.inner_text("#dataset")
