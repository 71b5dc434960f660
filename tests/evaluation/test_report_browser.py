"""The report in a headless browser: on a narrow and a wide screen, and in print."""

from __future__ import annotations

import html
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from evaluation.report import write_report
from tests.evaluation.report_results import write_results

pytestmark = pytest.mark.long

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
POLICIES = ("vllm", "sarathi-edf", "qoserve:artifact=true", "slidingserve", "slidingserve+relegation")

# A browser's window has a least width of about 500 pixels, a frame in it has none. The page allows no scripts, so the
# one that measures stands around it.
FRAME = """<!doctype html><html><body style="margin:0">
<iframe style="border:0;width:%(width)dpx;height:900px" srcdoc="%(page)s"></iframe><pre id="measured"></pre>
<script>
addEventListener("load", () => {
  const inner = document.querySelector("iframe").contentDocument, root = inner.documentElement;
  const hidden = (e) => e.closest(".scroll") !== null;
  const beyond = [...inner.querySelectorAll("body *")].filter(
    (e) => !hidden(e) && e.getBoundingClientRect().right > root.clientWidth + 0.5);
  const boxes = [...inner.querySelectorAll("svg, img")].map((e) => e.getBoundingClientRect());
  const texts = [...inner.querySelectorAll("figure text")].map((e) => e.getBoundingClientRect().height);
  document.getElementById("measured").textContent = JSON.stringify({
    width: root.clientWidth, needed: root.scrollWidth, beyond: beyond.map((e) => e.outerHTML.slice(0, 80)),
    pictures: boxes.map((b) => [b.width, b.height]), smallest_text: Math.min(...texts),
    sections: [...inner.querySelectorAll("section")].map((e) => [e.id, e.getBoundingClientRect().height]),
    scrolls: [...inner.querySelectorAll(".scroll")].filter((e) => e.scrollWidth > e.clientWidth).length,
    fetched: inner.defaultView.performance.getEntriesByType("resource").length
  });
});
</script></body></html>
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"needs a browser: one of {', '.join(NAMES)} (Debian: apt-get install chromium)")
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return write_report(write_results(folder / "results", policies=POLICIES), folder / "page").page


def look(browser: str, page: Path, folder: Path, *flags: str) -> str:
    """Opens a page with a browser that has no profile; returns what it writes."""
    command = [browser, *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, page.as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def measured(browser: str, text: str, width: int, folder: Path) -> dict[str, Any]:
    framed = folder / "framed.html"
    framed.write_text(FRAME % {"width": width, "page": html.escape(text)}, encoding="utf-8")
    dom = look(browser, framed, folder, f"--window-size={width + 100},1000", "--dump-dom")
    found = re.search(r'<pre id="measured">(.+?)</pre>', dom)
    assert found, dom[-500:]
    values: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert values["width"] == width
    return values


@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_reaches_beyond_the_screen(browser: str, page: Path, tmp_path: Path, width: int) -> None:
    values = measured(browser, page.read_text(encoding="utf-8"), width, tmp_path)
    assert values["beyond"] == []
    assert values["needed"] <= width
    assert values["fetched"] == 0
    assert [name for name, _ in values["sections"]] == ["goodput", "violations", "latency", "timeline", "cost"]
    assert all(height > 200 for _, height in values["sections"])
    assert len(values["pictures"]) == 5 + 5 + 10 + 1 + 2 + 2 * len(POLICIES)  # and two legends
    assert all(w > 10 and h > 10 for w, h in values["pictures"])
    assert values["smallest_text"] > 7.5
    assert (values["scrolls"] > 0) == (width == 400)


def test_the_measure_notices_what_reaches_beyond(browser: str, page: Path, tmp_path: Path) -> None:
    broken = page.read_text(encoding="utf-8").replace("overflow-x: auto", "overflow-x: visible")
    assert measured(browser, broken, 400, tmp_path)["needed"] > 400


def test_the_page_is_drawn(browser: str, page: Path, tmp_path: Path) -> None:
    shot = tmp_path / "page.png"
    look(browser, page, tmp_path, "--window-size=1400,1200", f"--screenshot={shot}")
    data = shot.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1400, 1200)
    assert len(data) > 50_000  # an empty page has 8 kB


def test_every_section_begins_a_page_in_print(browser: str, page: Path, tmp_path: Path) -> None:
    printed = tmp_path / "page.pdf"
    look(browser, page, tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={printed}")
    pages = len(re.findall(rb"/Type\s*/Page\b", printed.read_bytes()))
    assert 5 <= pages <= 15


def test_pictures_lie_beside_the_page(page: Path) -> None:
    files = sorted((page.parent / "figures").iterdir())
    assert [file.name for file in files] == [
        f"{n}.png" for n in ("cost", "goodput", "latency", "timeline", "violations")
    ]
    for file in files:
        width, height = struct.unpack(">II", file.read_bytes()[16:24])
        assert width > 1000
        assert height > 300
