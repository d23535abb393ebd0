"""An HTML page as a browser would read it: elements with their attributes and the text in each."""

import base64
import hashlib
import itertools
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

_WITHOUT_END = {"br", "img", "input", "link", "meta"}


@dataclass(frozen=True, slots=True)
class Element:
    tag: str
    attributes: dict[str, str | None]
    words: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text in it, blanks made one."""
        return " ".join("".join(self.words).split())


class Page(HTMLParser):
    """The elements of a page in order; a tag that is closed in the wrong place fails the test."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self.words: list[str] = []
        self._open: list[Element] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs)))
        if tag not in _WITHOUT_END:
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        for element in self._open:
            element.words.append(data)

    def all(self, tag: str, **wanted: str) -> list[Element]:
        return [
            element for element in self.elements if element.tag == tag and wanted.items() <= element.attributes.items()
        ]

    def said(self, tag: str, **wanted: str) -> list[str]:
        return [each.text for each in self.all(tag, **wanted)]

    def named(self, identifier: str) -> str:
        [text] = [element.text for element in self.elements if element.attributes.get("id") == identifier]
        return text

    def assert_self_contained(self) -> None:
        """Fail if headings skip a level, anything is loaded, or more is allowed than its own style and script."""
        levels = [int(element.tag[1]) for element in self.elements if re.fullmatch("h[1-6]", element.tag)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
        [policy] = [
            element.attributes["content"] for element in self.all("meta", **{"http-equiv": "Content-Security-Policy"})
        ]
        allowed = ["default-src 'none'"]
        for tag in ("style", "script"):
            for each in self.all(tag):
                if each.attributes:
                    continue  # data
                digest = base64.b64encode(hashlib.sha256("".join(each.words).encode()).digest()).decode()
                allowed.append(f"{tag}-src 'sha256-{digest}'")
        assert policy == "; ".join([*allowed, "img-src data:", "base-uri 'none'", "form-action 'none'"])
        for element in self.elements:
            assert "style" not in element.attributes
            assert not any(name.startswith("on") for name in element.attributes)
            links = (element.attributes.get(name) for name in ("src", "href", "action", "xlink:href"))
            assert all(link.startswith(("#", "data:")) for link in links if link)

    def ids(self) -> list[str]:
        return [element.attributes["id"] or "" for element in self.elements if "id" in element.attributes]

    def tables(self) -> list[list[list[str]]]:
        """Return the cells of each table by rows."""
        tables: list[list[list[str]]] = []
        for element in self.elements:
            if element.tag == "table":
                tables.append([])
            elif element.tag == "tr":
                tables[-1].append([])
            elif element.tag in {"td", "th"}:
                tables[-1][-1].append("".join(element.words))
        return tables
