"""Screenshots of a run's page and of its report: light and dark, 1280 and 390 pixels wide.

    python scripts/page_screenshots.py RUN -o FOLDER
    python scripts/page_screenshots.py RUN -o docs/images --first    # the images of the documents

The run may have been copied from another machine. It needs the extra `show`, Playwright and a Chromium, whose path
CHROMIUM names where it is not found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

_LONGEST = 6000  # pixels of a page that are kept: a dataset may be long


def main() -> None:
    """Serves the run, looks at it in each way, and writes one PNG each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("screenshots"))
    parser.add_argument("--first", action="store_true", help="the first screen of the live page, as a small file")
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    command = [sys.executable, "-m", "flame_train", "show", str(asked.run), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        report = {"report": (asked.run / "report.html").resolve().as_uri()}
        for name, url in ({"run": address} if asked.first else {"live": address} | report).items():
            for scheme in ("light", "dark"):
                for width in (1280, 390):
                    _look(browser, url, scheme, width, asked.output / f"{name}-{scheme}-{width}.png", asked.first)
        server.terminate()


def _look(browser: Browser, url: str, scheme: str, width: int, path: Path, first: bool) -> None:
    size = {"width": width, "height": 860}
    page = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
    page.set_default_timeout(120_000)
    page.goto(url)
    page.wait_for_selector("#dataset tbody tr")
    page.wait_for_load_state("networkidle")
    if not first:
        size["height"] = min(page.evaluate("document.documentElement.scrollHeight"), _LONGEST)
        page.set_viewport_size(size)  # type: ignore[arg-type]  # so that what is loaded when seen is loaded
        page.wait_for_load_state("networkidle")
    page.screenshot(path=path)
    if first:
        with Image.open(path) as image:
            image.convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)
    page.close()
    print(path)


if __name__ == "__main__":
    main()
