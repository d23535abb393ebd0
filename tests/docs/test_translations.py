"""The Chinese pages show what the English ones show."""

import re
from pathlib import Path

import pytest

from docs import made
from tests.docs.pages import DOCS, ROOT, blocks, name_of

TRANSLATED = [
    (ROOT / "README.md", ROOT / "README.zh-CN.md"),
    *((page.with_name(page.name.replace(".zh.", ".")), page) for page in sorted(DOCS.rglob("*.zh.md"))),
]


@pytest.mark.parametrize(("page", "translation"), TRANSLATED, ids=[name_of(page) for page, _ in TRANSLATED])
def test_a_translation_has_the_same_code_sections_tables_and_links(page: Path, translation: Path) -> None:
    ours, theirs = (path.read_text(encoding="utf-8") for path in (page, translation))
    for name, table in made.TABLES.items():
        ours = ours.replace(f"<!-- made: {name} -->", table())
    assert [block.text for block in blocks(ours)] == [block.text for block in blocks(theirs)]
    for pattern in (r"^#+ ", r"^\|", r"^- "):
        assert len(re.findall(pattern, ours, re.MULTILINE)) == len(re.findall(pattern, theirs, re.MULTILINE)), pattern
    assert targets(ours) <= targets(theirs)
    assert targets(theirs) - targets(ours) <= {page.name}


def targets(text: str) -> set[str]:
    """Return where a page leads; a translation counts as the page that it translates."""
    actual = {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)} - {""}
    return {re.sub(r"\.zh(-CN)?\.md$", ".md", target) for target in actual}
