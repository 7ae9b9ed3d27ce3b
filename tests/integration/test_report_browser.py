"""The report in a real browser: from a spike to its tokens, both themes, two widths, nothing loaded, no error.

Screenshots are artefacts: PIPELINERL_SCREENSHOTS names their folder, else they lie in pytest's temporary one.
"""

import json
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from pipelinerl.inspect.page.build import LiveRuns, make_server, write_page
from pipelinerl.streams import set_streams_backend
from tests.browser import Page, browser_page, find_browser
from tests.run_folder import Story, make_run

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on PATH: `make browser` installs it (Debian: apt-get install chromium)"
)
SPIKE = 9
TINY = """(node) => node.childElementCount === 0 && node.textContent.trim() && node.getClientRects().length
  && !node.closest("svg, script, option") && parseFloat(getComputedStyle(node).fontSize) < 12"""
"""Text that is shown smaller than 12 pixels; charts have labels of 11."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    set_streams_backend("files")
    folder = tmp_path_factory.mktemp("report")
    spiked = [1.0] * SPIKE + [40.0] + [1.0] * (20 - SPIKE - 1)
    first = make_run(folder / "first", Story(steps=20, finetune={"grad_norm": spiked}))
    second = make_run(folder / "second", Story(steps=12, seed=1, overrides=("finetune.learning_rate=1e-4",)))
    write_page([first], folder / "one.html")
    write_page([first, second], folder / "two.html")
    return folder


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    assert BROWSER is not None
    async with browser_page(BROWSER) as page:
        yield page
        assert page.errors == []
        assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ.get("PIPELINERL_SCREENSHOTS", tmp_path_factory.mktemp("screenshots")))


async def test_from_a_spike_to_its_tokens_in_three_clicks(folder: Path, page: Page, pictures: Path) -> None:
    await page.prefer("light")
    await page.size(1280, 900)
    await page.open((folder / "one.html").as_uri())
    left, right, width = 44, 8, 400  # of the chart, as page.js has them
    place = (left + (width - left - right) * SPIKE / 19) / width
    await page.click('[data-chart="Gradient norm"] svg', place, 0.5)
    rows = "[...document.querySelectorAll('#table tbody tr')]"
    steps = await page.run(f"{rows}.map((row) => row.cells[0].textContent)")
    assert set(steps) == {str(SPIKE)}, "the batch of the step whose metrics show the spike"
    await page.click("#table tbody tr")
    await page.click("#detail .tokens u")
    told = await page.run("document.querySelector('#token').innerText.replace(/\\s+/g, ' ')")
    assert "lag 1 log-prob of the server -0." in told
    for fact in ("version 8", "of the trainer -", "ratio ", "clipped or corrected ", "advantage "):
        assert fact in told
    await page.screenshot(pictures / "report_tokens.png", whole=False)


async def test_two_attempts_beside_each_other_and_what_a_model_says_is_text(folder: Path, page: Page) -> None:
    await page.size(1280, 900)
    await page.open((folder / "one.html").as_uri())
    await page.run("document.querySelector('[data-id=\"0-38/2\"]').click()")
    await page.click("#detail [data-beside]")
    first, second = await page.run(
        "[...document.querySelectorAll('[data-attempt]')].map((node) => node.dataset.attempt)"
    )
    assert first == "0-38/2"
    assert second.startswith("0-38/")
    assert second != first
    boxes = await page.run("[...document.querySelectorAll('[data-attempt]')].map((n) => n.getBoundingClientRect().top)")
    assert boxes[0] == boxes[1]
    await page.run("document.querySelector('[data-id=\"0-38/2\"]').click()")
    said = await page.run("document.querySelector('#detail .tokens').textContent")
    assert "é 漢字 <b>&amp;</b>" in said
    assert await page.run("document.querySelector('#detail .tokens b')") is None
    bands = await page.run("new Set([...document.querySelectorAll('.tokens u')].map((n) => n.style.background)).size")
    assert bands == 2, "two weight versions sampled it"


async def test_filters_and_sorting(folder: Path, page: Page) -> None:
    await page.open((folder / "one.html").as_uri())

    async def fill(name: str, value: str) -> None:
        await page.run(
            f"(() => {{ const input = document.querySelector('#filters').elements['{name}']; input.value = '{value}';"
            " input.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )

    rewards = "[...document.querySelectorAll('#table tbody tr')].map((row) => Number(row.cells[3].textContent))"
    await fill("low", "1")
    assert set(await page.run(rewards)) == {1}
    await fill("low", "")
    await page.run("[...document.querySelectorAll('th button')].find((b) => b.textContent === 'reward').click()")
    ordered = await page.run(rewards)
    assert ordered == sorted(ordered, reverse=True)
    await fill("text", "(3-1)")
    names = await page.run("[...document.querySelectorAll('#table tbody tr')].map((row) => row.cells[1].textContent)")
    assert names
    assert {name.split("/")[0] for name in names} == {"0-7"}
    await fill("text", "")
    await fill("outcome", "evaluation")
    names = await page.run("[...document.querySelectorAll('#table tbody tr')].map((row) => row.cells[1].textContent)")
    assert all(name.startswith("test-") for name in names)


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 1280),
        ("dark", 390),
        pytest.param("light", 390, marks=pytest.mark.slow),
        pytest.param("dark", 1280, marks=pytest.mark.slow),
    ],
)
async def test_readable_in_both_themes_and_widths(
    folder: Path, page: Page, pictures: Path, scheme: str, width: int
) -> None:
    await page.prefer(scheme)
    await page.size(width, 900)
    await page.open((folder / "two.html").as_uri())
    assert await page.run("document.documentElement.scrollWidth") <= width
    small = await page.run(f"[...document.querySelectorAll('body *')].filter({TINY}).map((node) => node.textContent)")
    assert small == []
    background = await page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) > 384) == (scheme == "light")
    await page.screenshot(pictures / f"report_{scheme}_{width}.png")


async def test_several_runs_are_told_apart_and_their_differing_keys_named(folder: Path, page: Page) -> None:
    await page.open((folder / "two.html").as_uri())
    assert await page.run("document.querySelector('#title').textContent") == "first  ·  second"
    table = await page.run("document.querySelector('#config table').innerText")
    assert "finetune.learning_rate" in table
    assert "max_lag_steps" not in table
    lines = await page.run("document.querySelectorAll('[data-chart=Reward] path').length")
    assert lines == 4, "sampled and trained, of two runs"
    await page.run(
        "(() => { const select = document.querySelector('#filters').elements.run; select.value = '1';"
        " select.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    steps = await page.run(
        "Math.max(...[...document.querySelectorAll('#table tbody tr')].map((r) => +r.cells[0].textContent))"
    )
    assert steps == 11


async def test_served_page_follows_the_run(tmp_path: Path, page: Page) -> None:
    run_dir = make_run(tmp_path / "run", Story(steps=6, finished=False))
    server = make_server(LiveRuns([run_dir], fresh_s=0.0))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        await page.open(url)
        assert "step 6 of 6" in await page.run("document.querySelector('#subtitle').textContent")
        metrics = run_dir / "metrics" / "finetune.jsonl"
        newest = json.loads(metrics.read_text().splitlines()[-1]) | {"step": 7}
        with metrics.open("a") as file:
            file.write(json.dumps(newest) + "\n")
        await page.until("document.querySelector('#subtitle').textContent.includes('step 7 of 6')")
        assert {request.removeprefix(url) for request in page.requests} <= {"", "data"}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        page.requests.clear()


def test_serve_refuses_other_hosts_and_unknown_paths(folder: Path) -> None:
    server = make_server(LiveRuns([folder / "first"]))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert httpx.get(f"{url}/etc/passwd").status_code == 404
        assert httpx.get(f"{url}/data", headers={"Host": "evil.example"}).status_code == 403
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
