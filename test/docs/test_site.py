"""The site of ``docs/`` builds without a warning, and works in a real browser."""

import functools
import http.server
import re
import subprocess
import sys
import threading
import zlib
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "test/house"), str(ROOT / "docs/site")]

import public_api  # noqa: E402

SHOWN = (
    "index.html",
    "start.html",
    "environments.html",
    "learning.html",
    "torchrl-arguments.html",
    "concepts/tokens.html",
    "concepts/who-talks-to-whom.html",
    "tutorials/losses-in-your-loop.html",
    "tutorials/reading-a-run.html",
    "tutorials/coming-from-trl.html",
    "tutorials/coming-from-torchrl.html",
    "api/objectives.html",
    "api/classes/objectives.GRPOLoss.html",
    "losses.html",
    "api/torchrl_agents.html",
    "reference.html",
)
"""A page of each kind, the widest tables among them."""


WITHOUT_LIBRARY = """
import sys
sys.modules.update(dict.fromkeys(["torch", "tensordict", "vllm", "ray", "transformers"]))
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` builds it, where the library can't be imported."""
    out = tmp_path_factory.mktemp("site")
    options = ["--fail-on-warning", "--keep-going", "--quiet"]
    options += ["-D", "highlight_language=none"]  # modules in one colour: a third of the time
    places = ["--doctree-dir", str(out / "doctrees"), str(ROOT / "docs"), str(out / "html")]
    command = [sys.executable, "-c", WITHOUT_LIBRARY, *options, *places]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=out)
    assert (done.returncode, done.stderr) == (0, "")
    return out / "html"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def address(site):
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def page(browser):
    """A page that keeps what its console says."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.said = []
    page.on("console", lambda m: page.said.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: page.said.append(str(error)))
    yield page
    context.close()


def inventory(site):
    """Names that other sites may link to, with their kinds."""
    data = (site / "objects.inv").read_bytes()
    text = zlib.decompress(data.split(b"\n", 4)[4]).decode()
    return {line.split()[0]: line.split()[1] for line in text.splitlines()}


def test_every_public_name_has_an_entry(site):
    names = inventory(site)
    described = {name for name, kind in names.items() if kind.startswith("py:")}
    assert set(public_api.public_names()) - described == set()


def test_the_page_of_all_names_leads_to_each_where_it_is_described(site):
    text = (site / "api/torchrl_agents.html").read_text("utf-8")
    packages = ("torchrl_data", "torchrl_modules", "torchrl_envs", "objectives", "collectors")
    expected = {name for package in packages for name in import_module(package).__all__}
    shown = re.findall(r'<li><p><a class="reference internal" href="([^"]+)"[^>]*>', text)
    assert {link.rpartition(".")[2] for link in shown} == expected
    assert len(shown) == len(expected)
    assert "torchrl_agents.html" not in {link.partition("#")[0] for link in shown}
    assert inventory(site)["torchrl_agents.GRPOLoss"] == "py:class"


def test_members_have_entries_with_their_types(site):
    names = inventory(site)
    text = (site / "api/objectives.functional.html").read_text("utf-8")
    assert names["objectives.GRPOLoss.forward"] == "py:method"
    assert names["objectives.GRPOLossOutput.clip_fraction"] == "py:attribute"
    entry = text[text.index('id="objectives.functional.clipped_surrogate"') :]
    told = re.sub(r"<[^>]+>", "", entry[: entry.index("</dl>")])
    assert "clip_low" in told
    assert "Float[Tensor" in told
    assert "[source]" in entry[: entry.index("</dt>")]


def test_a_class_has_a_page_with_every_setting_and_the_names_of_its_methods(site):
    """The settings of a loss are in a record, and its constructor takes each by name."""
    from objectives import GRPOOptions

    text = (site / "api/classes/objectives.GRPOLoss.html").read_text("utf-8")
    said = re.sub(r"<[^>]+>", "", text)
    assert "Unpack" not in said
    for field in fields(GRPOOptions):
        assert re.search(rf"^{field.name}: .* = ", said, re.MULTILINE), field.name
        assert re.search(rf"^{field.name}.* – ", said, re.MULTILINE), field.name
    names = inventory(site)
    assert not [name for name in names if name.endswith("async") and not name.endswith("_async")]
    classes = {name for name, kind in names.items() if kind == "py:class"}
    pages = {path.name.removesuffix(".html") for path in (site / "api/classes").glob("*.html")}
    assert pages <= classes
    assert len(pages) > 150


def test_formulas_are_shown_without_a_script(site):
    text = (site / "losses.html").read_text("utf-8")
    assert text.count("<math") > 30
    assert not re.search(r"src=\"[^\"]*mathjax", text, re.IGNORECASE)


def test_broken_links_are_found(tmp_path):
    from links import broken

    (tmp_path / "a.html").write_text(
        '<h1 id="here">A</h1><a href="b.html#there">1</a><a href="b.html#gone">2</a>'
        '<a href="#here">3</a><a href="c.html">4</a><img src="no.png"><a href="https://x.y/">5</a>'
    )
    (tmp_path / "b.html").write_text('<p id="there">B</p><a href="a.html#here">A</a>')
    assert broken(tmp_path) == ["a.html: b.html#gone", "a.html: c.html", "a.html: no.png"]


@pytest.mark.parametrize("name", SHOWN)
def test_pages_load_without_an_error_and_fit_a_phone(page, address, name):
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{address}/{name}", wait_until="load")
    assert page.said == []
    images = "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
    page.evaluate("[...document.images].forEach(image => image.loading = 'eager')")
    page.wait_for_load_state("networkidle")
    assert page.evaluate(images) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_sidebar_marks_its_own_page_where_it_has_it(site):
    """Pages of classes and sources have none, and those of a folder share one."""
    marked = re.compile(r'<li class="[^"]*current-page[^"]*"><a class="[^"]*" href="([^"]*)">')
    for name in ("start.html", "losses.html", "concepts/tokens.html", "api/objectives.html"):
        assert marked.findall((site / name).read_text("utf-8")) == ["#"], name
    listed = re.compile(r'<li class="toctree-l1[^"]*"><a class="[^"]*" href="([^"]*)">')
    for name in ("api/classes/objectives.GRPOLoss", "_modules/objectives/losses/grpo"):
        text = (site / f"{name}.html").read_text("utf-8")
        assert marked.findall(text) == []
        assert "../" * name.count("/") + "start.html" in listed.findall(text)


def test_search_finds_a_class_without_a_server_of_its_own(page, address):
    page.goto(f"{address}/index.html")
    page.get_by_placeholder("Search").first.fill("GRPOLoss")
    page.keyboard.press("Enter")
    first = page.locator("#search-results ul.search li a").first
    first.wait_for()
    assert "api/classes/objectives.GRPOLoss.html" in first.get_attribute("href")
    assert page.said == []


def test_keyboard_alone_leads_through_the_pages(page, address):
    page.goto(f"{address}/start.html")
    page.keyboard.press("Tab")
    assert "Skip to content" in page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    page.wait_for_url("**/start.html#furo-main-content")  # a moment after the key
    page.goto(f"{address}/start.html")
    with page.expect_navigation():
        page.keyboard.press("ArrowRight")
    assert page.url.endswith("/overview.html")


CONTRAST = """() => {
    const rgb = c => c.match(/[\\d.]+/g).slice(0, 3).map(Number);
    const light = c => rgb(c).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const ground = light(getComputedStyle(document.body).backgroundColor);
    const boxes = [...document.querySelectorAll('svg.fig rect')]
        .map(r => light(getComputedStyle(r).fill));
    const words = [...document.querySelectorAll('svg.fig text')]
        .map(t => light(getComputedStyle(t).fill));
    return Math.min(...words.flatMap(w => [ground, ...boxes].map(b => ratio(w, b))));
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["tokens", "episodes", "who-talks-to-whom", "age"])
def test_drawings_can_be_read_in_light_and_dark(page, address, name, theme):
    """The contrast that WCAG asks for, of every colour of words on every colour below them."""
    other = "dark" if theme == "light" else "light"
    page.emulate_media(color_scheme=other)  # what the reader chose on the page wins
    page.add_init_script(f"localStorage.setItem('theme', '{theme}')")
    page.goto(f"{address}/concepts/{name}.html")
    assert page.evaluate("document.body.dataset.theme") == theme
    assert page.locator("svg.fig").count() >= 1
    assert page.evaluate(CONTRAST) >= 4.5


def test_a_word_of_the_glossary_is_linked_once(site):
    text = (site / "streaming.html").read_text("utf-8")
    body = text[text.index("<article") : text.index("</article>")]
    links = re.findall(r'href="glossary.html#(term-[\w-]+)"', body)
    assert "term-trajectory" in links
    assert len(links) == len(set(links))
    assert 'id="term-trajectory"' in (site / "glossary.html").read_text("utf-8")


def test_figures_are_those_of_the_script(tmp_path, monkeypatch):
    import runpy

    drawn = runpy.run_path(str(ROOT / "docs/concepts/figures.py"))
    monkeypatch.setitem(drawn["Drawing"].write.__globals__, "HERE", tmp_path)
    for name in ("tokens", "episode", "sync", "streaming", "ray", "age"):
        drawn[name]()
        now = (tmp_path / f"{name}.svg").read_text("utf-8")
        assert (ROOT / f"docs/concepts/{name}.svg").read_text("utf-8") == now
