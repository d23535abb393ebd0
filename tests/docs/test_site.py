"""The site builds without a warning, says what the code says, and is a decent page in a browser."""

import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import typer.main
from markdown_it import MarkdownIt
from playwright.sync_api import Browser

from docs import made
from hookscope.cli.app import app
from hookscope.rules import RULES
from tests.docs.pages import DOCS, ROOT
from tests.reporting.chromium import Opened, browser, needs_chromium  # noqa: F401 - a fixture

PAGES = [page.relative_to(DOCS).with_suffix(".html").as_posix() for page in sorted(DOCS.rglob("*.md"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # advertises a successor
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")
    return folder


@pytest.mark.exhaustive
def test_every_page_is_on_the_site_and_nothing_comes_from_elsewhere(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        built = (site / page.relative_to(DOCS)).with_suffix(".html")
        text = built.read_text(encoding="utf-8")
        assert "<!-- made:" not in text
        for outside in ('src="http', 'src="//', 'rel="stylesheet" href="http', "fonts.g"):
            assert outside not in text, (page, outside)


class _Page(HTMLParser):
    """The ids of a page, and where it points to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value for name, value in attrs if value}
        self.ids |= {named[name] for name in ("id", "name") if name in named and (name == "id" or tag == "a")}
        self.targets |= {named[name] for name in ("href", "src") if name in named}


def as_github_shows(path: Path) -> _Page:
    """Return a Markdown file as a page, with the ids that GitHub gives headings."""
    markdown = MarkdownIt("commonmark").enable("table")
    tokens = markdown.parse(path.read_text(encoding="utf-8"))
    page = _Page(markdown.renderer.render(tokens, markdown.options, {}))
    for opening, inside in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            shown = "".join(each.content for each in inside.children or () if each.type in {"text", "code_inline"})
            slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
            repeats = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", each) is not None for each in page.ids)
            page.ids.add(f"{slug}-{repeats}" if repeats else slug)
    return page


def broken_links(pages: dict[Path, _Page]) -> list[str]:
    """Return each link to a file that is not there, or to an id that its page does not have."""
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = place / "index.html" if place.is_dir() and path.suffix == ".html" else place
            state = "=" in parts.fragment  # of a run's page in the gallery: its script reads it
            expected = pages[place].ids if place in pages and not state else None
            if not place.exists() or (
                expected is not None and parts.fragment and unquote(parts.fragment) not in expected
            ):
                broken.append(f"{path.name}: {target}")
    return broken


@pytest.mark.exhaustive
def test_every_link_of_the_site_leads_to_a_file_and_an_id_that_exist(site: Path) -> None:
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    pages.pop(site.resolve() / "404.html")  # its links start at the address where the site is served
    assert len(pages) >= len(PAGES)
    assert broken_links(pages) == []


def test_every_link_of_the_markdown_files_leads_to_a_file_and_a_heading_that_exist() -> None:
    shown = {*ROOT.glob("*.md"), *(ROOT / "sample_images").glob("*.md"), *DOCS.rglob("*.md")}
    pages = {path: as_github_shows(path) for path in shown}
    assert {target for page in pages.values() for target in page.targets if "#" in target}
    assert broken_links(pages) == []


@pytest.mark.exhaustive
def test_llms_txt_names_every_page_and_schema_with_what_it_is_about(site: Path) -> None:
    lines = (site / "llms.txt").read_text(encoding="utf-8").splitlines()
    named = dict(re.findall(r"^- \[[^]]+\]\(([^)]+)\)(?:: )?(.*)$", "\n".join(lines), re.MULTILINE))
    pages = [page.relative_to(DOCS).with_suffix(".html").as_posix() for page in DOCS.rglob("*.md")]
    assert {name for name in named if name.endswith(".html")} == set(pages)
    assert all((site / name).exists() for name in named)
    assert [name for name in pages if not 40 <= len(named[name]) <= 400] == []
    assert named["commands/models.html"].startswith("Which names can MODEL be? `models` lists them, one per line: ")


@pytest.mark.exhaustive
def test_every_option_and_rule_is_on_the_site(site: Path) -> None:
    options = (site / "reference" / "options.html").read_text(encoding="utf-8")
    for command in typer.main.get_command(app).commands.values():
        for parameter in command.params:
            names = [*parameter.opts, *parameter.secondary_opts]
            assert max(names, key=len) in options or parameter.metavar in options, parameter
    rules = (site / "reference" / "rules.html").read_text(encoding="utf-8")
    for rule in RULES.values():
        assert f'id="{rule.identifier}"' in rules
        assert all(name.replace("_", "-") in rules for name in rule.limits)


def test_what_is_made_of_a_rule_has_its_limits_and_their_basis() -> None:
    text = made.rules()
    section = text[text.index("## dead-channels") : text.index("## quiet-channels")]
    assert "Default level: warn. Looks at a forward pass." in section
    assert "**`max-fraction = 0.8`**" in section
    assert "Basis: seeded networks of torchvision stay" in section


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served: its search asks for files, which a browser refuses to pages from the disk."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@needs_chromium
@pytest.mark.exhaustive
def test_pages_are_decent_in_a_browser(browser: Browser, address: str) -> None:  # noqa: F811
    """Every second page is examined light and on a wide screen, the others dark; all fit a telephone."""
    names = [name for name in PAGES if not name.endswith(".zh.html") or name == "hooks.zh.html"]  # alike in structure
    for scheme, widths, chosen in (("light", (1280, 390), names[::2]), ("dark", (390,), names[1::2])):
        page = browser.new_page(color_scheme=scheme)
        opened = Opened(page)
        page.on("console", lambda message, opened=opened: opened.wrong.append(message.text))
        page.on("request", lambda request, opened=opened: opened.wrong.extend(elsewhere(request.url, address)))
        for name in chosen:
            page.set_viewport_size({"width": widths[0], "height": 900})
            page.goto(address + name)
            assert opened.axe_violations() == [], name
            for width in widths:
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert opened.wrong == []
        page.close()


def elsewhere(url: str, address: str) -> list[str]:
    return [] if url.startswith(address) else [url]


@needs_chromium
@pytest.mark.exhaustive
def test_the_search_finds_a_rule(browser: Browser, address: str) -> None:  # noqa: F811
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{address}index.html")
    page.locator("input.md-search__input").press_sequentially("quiet-channels")  # it listens to keys alone
    page.wait_for_selector(".md-search-result__item a[href*='rules']", timeout=120_000)
    page.close()


def test_the_skill_and_the_changelog_are_short() -> None:
    assert len((DOCS / "agents/SKILL.md").read_text(encoding="utf-8").splitlines()) <= 60
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 80
