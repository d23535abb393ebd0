"""What MkDocs calls while it builds the site: lines `<!-- made: NAME -->` become what the code says of itself."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, whichever way MkDocs was started

from docs import made

_ENOUGH = 80  # characters that say what a page is about
_CODE = re.compile(r"(?<!<pre>)(?<!</span>)<code>[^<]*</code>")
_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
_LONG = re.compile(r"[^\s<>]{17,}")  # names that fill a column of a phone
_JOINT = re.compile(r"(?<=[_/:(|])(?=[\w'\"])|(?<=&#124;)|(?<=\w{3})(?=\.\w{5})")
_MARKER = re.compile(r"^<!-- made: ([a-z-]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Fill in what is made from the code, and note what the page is about."""
    _about[page.url] = (page.title or "", _opening(markdown))
    return _MARKER.sub(lambda marker: _PARTS[marker[1]](), markdown)


def on_page_content(html: str, **_: object) -> str:
    """Choose where code breaks between lines: at joints of long names, not after the hyphens of an option."""
    html = html.replace("、<code>", "、<wbr><code>").replace("&lt;=x&lt;=", "&lt;=x&lt;=<wbr>")
    return _CODE.sub(lambda code: _OPTION.sub(r'<span class="whole">\g<0></span>', _with_breaks(code[0])), html)


def _with_breaks(code: str) -> str:
    return _LONG.sub(lambda word: _JOINT.sub("<wbr>", word[0]), code)


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt beside the site: every page with what it is about, for programs that read."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    lines += [f"- [{title}]({address}): {sentence}" for address, (title, sentence) in _about.items()]
    schemas = sorted(Path(config.docs_dir, "schemas").glob("*.json"))
    lines += ["", "## JSON schemas", "", *(f"- [{path.stem}](schemas/{path.name})" for path in schemas)]
    Path(config.site_dir, "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")


def _opening(markdown: str) -> str:
    """Return the first sentence of a page, and the next ones if it is short, as plain text."""
    paragraphs = (" ".join(part.split()) for part in markdown.split("\n\n"))
    first = next((paragraph for paragraph in paragraphs if re.match(r"\w|\[|`[^`]", paragraph)), "")
    first = re.sub(r" ?\[中文\]\([^)]+\)", "", first)
    plain = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", first)
    message = ""
    for sentence in re.split(r"(?<=[.?]) |(?<=。)", plain):
        message = f"{message} {sentence}".strip()
        if len(message) >= _ENOUGH:
            break
    return message.rstrip(":")


def on_post_page(output: str, page: Page | None = None, **_: object) -> str:
    """Name the theme's search dialog for readers who hear the page, and the language that they are to hear."""
    named = output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
    is_chinese = page is not None and page.file.src_uri.endswith(".zh.md")
    return named.replace('<html lang="en"', '<html lang="zh-CN"') if is_chinese else named


def on_post_template(output_content: str, **_: object) -> str:
    """Name it on the page for what is not found, too."""
    return on_post_page(output_content)


_about: dict[str, tuple[str, str]] = {}
_PARTS: Mapping[str, "made.Part"] = {"options": made.options, "rules": made.rules, **made.TABLES}
