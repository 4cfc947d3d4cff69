"""The report's page: what it holds, and how a browser shows it on screens of any width, light and dark."""

import html
import json
import pathlib
import re
import subprocess

import numpy as np
import pytest
from striped_bench.report import style
from striped_bench.report.contents import gather
from striped_bench.report.read import Document, read

from striped_attention.cli import main
from tests.browser import BROWSER, needs_browser
from tests.small_results import layouts

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of the recorded results, which `striped report` draws by default."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert main(["report", "--output", str(path)]) == 0
    return path


def test_the_page_loads_nothing_and_has_both_colour_schemes(page):
    text = page.read_text()
    assert not re.findall(r"<script|@import|<img|<iframe|srcset", text)
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", text), "every link is within the page"
    assert not re.findall(r"url\((?!#)", text)
    assert "@media (prefers-color-scheme: dark)" in text
    for name in style.PALETTE:
        assert text.count(f"--{name}:") == 2
    assert "var(--ink, #1d2126)" in text, "figures take the page's colours"


def test_the_summary_has_the_three_values_that_matter():
    """On top of the page: attention, whole steps and accuracy; a page without such figures has no summary."""
    summary = gather(read([RESULTS])).summary
    assert [section.name for section in summary] == ["speedup-gpu", "steps", "accuracy"]
    assert [section.number for section in summary][:2] == [
        section.title.split(" times")[0].split()[-1] + "×" for section in summary[:2]
    ]
    assert summary[2].number in summary[2].title
    assert not gather([Document(pathlib.Path("small.json"), layouts())]).summary


def test_the_page_has_every_figure_and_says_what_is_missing(page):
    text = page.read_text()
    contents = gather(read([RESULTS]), plans=True)
    assert text.count("<svg ") == 2 * len(contents.sections), "a wide and a narrow drawing of each"
    names = "work timeline speedup-gpu speedup-cpu kernels steps scaling memory compiled-memory accuracy"
    for name in names.split():
        assert f'<section id="{name}">' in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for what, command in contents.missing:
        assert f"<td>{what}</td><td>{command}</td>" in text
    assert "1.45 on 8 A100" in text
    assert "1.65 on 16 TPUv4" in text


def chromium(path, folder, *flags):
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", *flags]
    return subprocess.run([*command, path.as_uri()], capture_output=True, text=True, check=True, timeout=120)


@needs_browser
def test_a_browser_shows_the_page_without_complaint(page, tmp_path):
    shown = chromium(page, tmp_path, "--enable-logging=stderr", "--dump-dom")
    assert shown.stdout.count("<svg") == page.read_text().count("<svg ")
    assert shown.stdout.rstrip().endswith("</html>")
    assert "CONSOLE" not in shown.stderr


@needs_browser
@pytest.mark.parametrize(("scheme", "bright"), [("1", True), ("0", False)])
def test_the_page_is_light_or_dark_as_the_reader_wishes(page, tmp_path, scheme, bright):
    from matplotlib.image import imread

    picture = tmp_path / "picture.png"
    flags = (f"--blink-settings=preferredColorScheme={scheme}", "--window-size=800,1600")
    chromium(page, tmp_path, *flags, f"--screenshot={picture}")
    assert (np.median(imread(picture)[..., :3]) > 0.5) == bright


# A browser's window has a least width, so the page is in a frame. For every figure: the drawings that are shown, the
# size of the smallest letters in CSS pixels, and the texts that are cut off at its edges.
MEASURE = """<body><pre></pre><iframe src="PAGE" style="border: 0; height: 900px; width: WIDTHpx"></iframe><script>
const frame = document.querySelector("iframe"), shown = element => element.getBoundingClientRect().width > 0;
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement;
  const figures = [...page.querySelectorAll("figure")].map(figure => {
    const drawn = [...figure.querySelectorAll("svg")].filter(shown), edge = drawn[0].getBoundingClientRect();
    const texts = [...drawn[0].querySelectorAll("text")].filter(text => text.textContent.trim());
    const size = text => parseFloat(getComputedStyle(text).fontSize) * Math.sqrt(text.getScreenCTM().a ** 2 +
      text.getScreenCTM().b ** 2);
    const cut = texts.filter(text => {
      const box = text.getBoundingClientRect();
      return box.left < edge.left - 1 || box.right > edge.right + 1;
    });
    return {name: figure.parentElement.id, drawn: drawn.length, size: Math.min(...texts.map(size)),
      cut: cut.map(text => text.textContent)};
  });
  const found = {wide: root.scrollWidth, screen: root.clientWidth, figures};
  document.querySelector("pre").textContent = JSON.stringify(found);
};
</script></body>"""


@needs_browser
@pytest.mark.parametrize("width", [375, 768, 1280])
def test_figures_fit_the_screen_and_their_text_is_legible(page, tmp_path, width):
    """Nothing scrolls sideways but tables, no text is smaller than 10 pixels, and each figure is shown once."""
    frame = tmp_path / "frame.html"
    frame.write_text(MEASURE.replace("PAGE", page.as_uri()).replace("WIDTH", str(width)))
    dumped = chromium(frame, tmp_path, "--allow-file-access-from-files", "--hide-scrollbars", "--dump-dom").stdout
    found = json.loads(html.unescape(re.search(r"<pre>(.+?)</pre>", dumped, re.DOTALL)[1]))
    assert found["wide"] <= found["screen"] == width
    assert len(found["figures"]) == len(gather(read([RESULTS]), plans=True).sections)
    for figure in found["figures"]:
        assert figure["drawn"] == 1, figure
        assert figure["size"] >= 9.99, figure
        assert figure["cut"] == [], figure
