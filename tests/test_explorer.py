"""The explorer's page and its command, `striped explore`: settings, addresses, screens of any width, no network."""

import html
import http.client
import itertools
import json
import pathlib
import re
import threading

import numpy as np
import pytest

import striped_attention as sa
from striped_attention import cli
from striped_attention.cli.explore import PAGE, make_server
from striped_attention.core.layout import named_layout
from tests.browser import chromium, needs_browser, run

COMPARED = """
const answer = [];
for (const where of PLACES) {
  location.hash = where, readHash();
  const { choices, best } = arithmetic.compare(setting());
  answer.push({ best: [best.layout.name, best.strategy], seconds: best.seconds, all: choices.map(one => one.seconds) });
}"""


@needs_browser
def test_the_best_choice_is_the_simplest_of_the_fastest(tmp_path):
    expected = {
        "devices=8&length=256k&heads=7": ["zigzag()", "ring"],
        "devices=8&length=64k&keyHeads=32&documents=yes&lengths=" + "2000-" * 30: ["contiguous()", "heads"],
        "devices=16&length=1M&mask=window": ["contiguous()", "ring"],
        "devices=8&length=256k&mask=full": ["contiguous()", "ring"],
    }
    for found, best in zip(
        run(COMPARED.replace("PLACES", json.dumps(list(expected))), tmp_path), expected.values(), strict=True
    ):
        assert found["best"] == best
        assert found["seconds"] <= 1.01 * min(found["all"])
        assert len(found["all"]) in (12, 15)


OTHER = {
    **{"devices": "12", "length": "100000", "layout": "striped", "stripe": "32", "mask": "both", "window": "17"},
    **{"left": "0", "right": "9", "prefix": "0", "documents": "yes", "lengths": "1000-8k-3", "strategy": "gather"},
    **{"tile": "64", "heads": "24", "keyHeads": "6", "dim": "96", "bytes": "4", "hardware": "custom"},
    **{"tflops": "123.5", "gbps": "7.25", "view": "sequence"},
}
STATE = """
const fields = Object.fromEntries(new FormData(form)), names = Object.keys(SETTINGS);
const answer = { hash: hash(), state, names, fields }"""


@needs_browser
def test_the_address_holds_every_setting(tmp_path):
    there = run(STATE, tmp_path, where="#" + "&".join(f"{name}={value}" for name, value in OTHER.items()))
    assert set(there["names"]) == set(OTHER)
    assert there["state"]["lengths"] == [1000, 8192, 3]
    assert (there["state"]["left"], there["state"]["prefix"], there["state"]["gbps"]) == (0, 0, 7.25)
    back = run(STATE, tmp_path, where="#" + there["hash"])
    assert back == there
    shown = {name: there["fields"][name] for name in ("devices", "length", "layout", "mask", "strategy", "tile")}
    assert shown == {name: OTHER[name] for name in shown}
    first = run(STATE, tmp_path)
    assert all(first["state"][name] != there["state"][name] for name in OTHER if name != "documents")
    assert run(STATE, tmp_path, where="#" + first["hash"]) == first
    assert run(STATE, tmp_path, where="#devices=1&length=x&layout=round&lengths=a&no=1&tflops=-1") == first


HANDS = """
const answer = {}, type = (name, text) => {
  control(name).value = text, find(name).dispatchEvent(new Event("input", { bubbles: true }));
};
const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
form.querySelector("[value=zigzag]").click();
find("documents").click();
type("length", "100k"), type("lengths", "50k 25600");
press(document.querySelectorAll("#bar [role=slider]")[0], "ArrowRight");
answer.moved = [[...state.lengths], find("lengths").value, document.querySelectorAll("#bar [role=slider]").length];
const edge = document.querySelectorAll("#bar [role=slider]")[0];
edge.scrollIntoView({ block: "center" });
const box = edge.getBoundingClientRect();
answer.reached = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2) === edge;
press(edge, "Home");
answer.home = [...state.lengths];
type("devices", "6"), answer.changed = [state.layout, state.devices, result.groups];
press(find("work"), "ArrowRight"), press(find("work"), "ArrowDown");
answer.block = find("block").textContent;
type("length", "many");
answer.bad = [find("problem").textContent, find("length").getAttribute("aria-invalid"), state.length];
type("length", "64k"), answer.good = [find("problem").textContent, find("length").getAttribute("aria-invalid")];
showChoices(), find("choices").querySelector("[data-strategy=heads]").click();
answer.taken = [state.layout, state.strategy, control("layout").value];
const controls = document.querySelectorAll("input, select, textarea, button, canvas, [role=slider]");
const named = x => x.labels?.length || x.getAttribute("aria-label") || x.textContent.trim();
answer.unnamed = [...controls].filter(element => !named(element)).map(element => element.id);
answer.playing = player.playing"""


@needs_browser
def test_settings_are_changed_by_hand(tmp_path):
    found = run(HANDS, tmp_path, "--force-prefers-reduced-motion")
    step = 1024
    assert found["moved"] == [[50 * 1024 + step, 25 * 1024 - step, 25 * 1024], "51k 24k 25k", 2]
    assert found["reached"], "by a pointer: nothing lies above the boundary"
    assert found["home"] == [1, 75 * 1024 - 1, 25 * 1024]
    assert found["changed"] == ["zigzag", 6, 6]
    assert found["block"].startswith("Device 1, step 2: the keys of device 0, ")
    problem = "Sequence length in tokens: use a number from 1 to 67,108,864."
    assert found["bad"] == [problem, "true", 100 * 1024], "the last good length stays"
    assert found["good"] == ["", "false"]
    assert found["taken"] == ["contiguous", "heads", "contiguous"]
    assert found["unnamed"] == []
    assert found["playing"] is False, "nothing moves by itself for people who do not want that"


CODES = """
const answer = PLACES.map(where => {
  location.hash = where, readHash(), update();
  return [find("code").textContent, setting().mask];
})"""


@needs_browser
def test_the_code_makes_the_layout_and_mask_of_the_settings(tmp_path):
    masks, layouts = ("causal", "full", "window", "both", "prefix"), ("contiguous", "striped", "zigzag")
    numbers = "length=64&devices=4&window=5&left=3&prefix=9&stripe=4"
    places = [
        f"{numbers}&mask={mask}&documents={documents}&right={right}&layout={layout}"
        for mask, documents, right, layout in itertools.product(masks, ("no", "yes"), (0, 2), layouts)
    ]
    for where, (code, rule) in zip(places, run(CODES.replace("PLACES", json.dumps(places)), tmp_path), strict=True):
        names = {"sa": sa, "segment_ids": np.zeros((1, 64), int)}
        exec("\n".join(code.splitlines()[:2]), names)
        assert rule.pop("ends") == ([64] if "documents=yes" in where else None)
        assert vars(names["mask"].rule) == rule, code
        assert (names["mask"].length is not None) == ("documents=yes" in where)
        assert names["layout"] == named_layout(re.search(r"layout=(\w+)", where)[1], 4)


FRAME = """<body><pre></pre><iframe src="PAGE" style="border: 0; height: 900px; width: WIDTHpx"></iframe><script>
document.querySelector("iframe").onload = event => {
  const page = event.target.contentDocument, root = page.documentElement, outside = element => {
    const box = element.getBoundingClientRect();
    return (box.left < 0 || box.right > root.clientWidth + 0.5) && !element.closest(".scroll");
  };
  page.querySelector("details").open = true;
  event.target.contentWindow.eval("showChoices()");
  const cut = [...page.querySelectorAll("body *")].filter(outside).map(element => element.outerHTML.slice(0, 99));
  document.querySelector("pre").textContent = JSON.stringify({ wide: root.scrollWidth, screen: root.clientWidth, cut });
};
</script></body>"""


@needs_browser
@pytest.mark.parametrize("where", ["", "#devices=64&length=1M&documents=yes&mask=both&layout=striped&hardware=custom"])
@pytest.mark.parametrize("width", [360, 800, 1280])
def test_nothing_scrolls_sideways(tmp_path, width, where):
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.replace("PAGE", PAGE.as_uri() + where).replace("WIDTH", str(width)))
    printed = chromium(frame.as_uri(), tmp_path, "--dump-dom")
    found = json.loads(html.unescape(re.search(r"<pre>(.+?)</pre>", printed, re.DOTALL)[1]))
    assert found == {"wide": width, "screen": width, "cut": []}


@needs_browser
@pytest.mark.parametrize(("scheme", "bright"), [("1", True), ("0", False)])
def test_the_page_is_light_or_dark_as_the_reader_wishes(tmp_path, scheme, bright):
    from matplotlib.image import imread

    flags = (f"--blink-settings=preferredColorScheme={scheme}", "--window-size=800,1600")
    chromium(PAGE.as_uri(), tmp_path, *flags, f"--screenshot={tmp_path / 'picture.png'}")
    assert (np.median(imread(tmp_path / "picture.png")[..., :3]) > 0.5) == bright


LARGE = """
const answer = ["devices=64&length=1M", "devices=64&length=1M&layout=striped&documents=yes&tile=128"].map(where => {
  location.hash = where; readHash(); writeAll(); update();
  return document.body.innerText;
})"""


@needs_browser
def test_a_million_tokens_on_64_devices_can_be_shown(tmp_path):
    plain, packed = run(LARGE, tmp_path)
    for text in (plain, packed):
        assert "16,384 tokens per device" in text
        assert not re.search(r"NaN|undefined|Infinity", text)
    assert plain != packed


def test_the_page_loads_nothing_from_a_network():
    text = PAGE.read_text()
    assert not re.findall(r"https?:|//\w+\.\w|@import|<link(?! rel=\"icon\" href=\"data:,\")|<img|<iframe|url\(", text)
    assert not re.findall(r"\bsrc=|\bfetch\(|XMLHttpRequest|WebSocket|sendBeacon|\bimport\b *[({\"']", text)


def test_the_page_in_docs_is_the_one_in_the_package():
    docs = pathlib.Path(__file__).parent.parent / "docs" / "explorer.html"
    assert docs.read_bytes() == PAGE.read_bytes()


def test_the_command_serves_the_page(capsys):
    with make_server(0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            for path, status in (("/", 200), ("/?a=b", 200), ("/etc/passwd", 404), ("/../explore.py", 404)):
                connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
                connection.request("GET", path)
                answer = connection.getresponse()
                assert answer.status == status
                if status == 200:
                    assert answer.getheader("Content-Type") == "text/html; charset=utf-8"
                    assert answer.read() == PAGE.read_bytes()
                connection.close()
            assert cli.main(["explore", "--port", str(server.server_port)]) == 2
            assert "cannot be used: Address already in use" in capsys.readouterr().err
        finally:
            server.shutdown()
            thread.join()
    assert cli.main(["explore", "--port", "70000"]) == 2
    assert "--port must be from 0 to 65535; got 70000" in capsys.readouterr().err


def test_the_command_opens_a_browser_and_ends_with_ctrl_c(monkeypatch, capsys):
    opened = []

    def stop(server):
        raise KeyboardInterrupt

    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("http.server.ThreadingHTTPServer.serve_forever", stop)
    assert cli.main(["explore"]) == 130
    assert cli.main(["explore", "--no-open"]) == 130
    first, second = re.findall(r"http://127\.0\.0\.1:\d+/", capsys.readouterr().out)
    assert opened == [first]
    assert second
