"""The Chinese pages show what the English ones show."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, blocks

TRANSLATED = [(ROOT / "README.md", ROOT / "README.zh-CN.md"), (DOCS / "hooks.md", DOCS / "hooks.zh.md")]


@pytest.mark.parametrize(("page", "translation"), TRANSLATED, ids=["README", "hooks"])
def test_a_translation_has_the_same_code_sections_tables_and_links(page: Path, translation: Path) -> None:
    ours, theirs = (path.read_text(encoding="utf-8") for path in (page, translation))
    assert [each.text for each in blocks(ours)] == [each.text for each in blocks(theirs)]
    for pattern in (r"^#+ ", r"^\|", r"^- "):
        assert len(re.findall(pattern, ours, re.MULTILINE)) == len(re.findall(pattern, theirs, re.MULTILINE)), pattern
    assert targets(ours) - targets(theirs) <= {"README.zh-CN.md", "docs/hooks.md"}
    assert targets(theirs) - targets(ours) <= {"README.md", "docs/hooks.zh.md", "hooks.md"}


def targets(text: str) -> set[str]:
    return {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)} - {""}
