"""Draws assets/report.png from a run: ``PYTHONPATH=. python assets/make_report.py RUN``. Needs Chromium.

The first screen of the run's report, and below it two attempts at one problem, token by token.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.image as images
import numpy as np

from pipelinerl.inspect.page.build import write_page
from tests.browser import browser_page, find_browser

WIDTH, HEIGHT = 1280, 800
STEP = 0.25
"""Share of the run at which the curve is clicked: there is still something to learn."""
OPEN_TWO = """(() => {
  for (const row of [...document.querySelectorAll("#table tbody tr")]) {
    document.querySelector(`[data-id="${row.dataset.id}"]`).click();
    const others = [...document.querySelectorAll("#detail [data-beside]")];
    const other = others.find((button) => !button.textContent.includes(`(${row.cells[3].textContent})`));
    if (other) { other.click(); break; }
  }
  document.querySelector("#detail .tokens u:last-child").click();
})()"""
"""Opens the first rollout that has an attempt with another reward beside it."""


async def take_pictures(page_path: Path, folder: Path) -> list[Path]:
    """Pictures of the page."""
    browser = find_browser()
    assert browser, "no Chromium on PATH"
    paths = [folder / "curves.png", folder / "tokens.png"]
    async with browser_page(browser) as page:
        await page.size(WIDTH, HEIGHT)
        await page.open(page_path.as_uri())
        await page.call("Emulation.setScrollbarsHidden", hidden=True)
        await page.screenshot(paths[0], whole=False)
        await page.click('[data-chart="Reward"] svg', STEP, 0.5)
        await page.run(OPEN_TWO)
        await page.size(WIDTH, 520)
        await page.run("document.querySelector('#detail .bar').scrollIntoView()")
        await page.screenshot(paths[1], whole=False)
    return paths


def main() -> int:
    target = Path(__file__).with_name("report.png")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_page([Path(sys.argv[1])], folder / "report.html")
        paths = asyncio.run(take_pictures(folder / "report.html", folder))
        pictures = [images.imread(path)[:, :, :3] for path in paths]
    images.imsave(target, np.concatenate(pictures), pil_kwargs={"optimize": True})
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
