"""A headless browser for the tests of `striped explore` and of the report."""

import html
import json
import re
import shutil
import subprocess

import pytest

from striped_attention.cli.explore import PAGE

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH")


def chromium(url, folder, *flags):
    """Return what headless Chromium prints for a page, and check that the page logs nothing."""
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    quiet = ["--disable-background-networking", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
    logged = [*command, *quiet, "--enable-logging=stderr", "--allow-file-access-from-files"]
    done = subprocess.run([*logged, *flags, url], capture_output=True, text=True, check=True, timeout=300)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def run(script, folder, *flags, where=""):
    """Return what a script at the end of the explorer's page assigns to `answer`; `where` is the end of its address."""
    path, show = folder / "page.html", "const shown = document.createElement('pre'); shown.id = 'answer';"
    show += "shown.textContent = JSON.stringify(answer); document.body.append(shown);"
    path.write_text(PAGE.read_text().replace("</body>", f"<script>{{ {script}; {show} }}</script></body>"))
    printed = chromium(f"{path.as_uri()}{where}", folder, *flags, "--dump-dom")
    return json.loads(html.unescape(re.search(r'<pre id="answer">(.+?)</pre>', printed, re.DOTALL)[1]))
