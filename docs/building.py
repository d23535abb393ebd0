"""What MkDocs calls while it builds the site: lines `<!-- made: NAME -->` become what the code says of itself."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, whichever way MkDocs was started

from docs import made

_MARKER = re.compile(r"^<!-- made: ([a-z-]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fill in what is made from the code."""
    return _MARKER.sub(lambda marker: _PARTS[marker[1]](), markdown)


def on_post_page(output: str, **_: object) -> str:
    """Name the theme's search dialog for readers who hear the page."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def on_post_template(output_content: str, **_: object) -> str:
    """Name it on the page for what is not found, too."""
    return on_post_page(output_content)


_PARTS: Mapping[str, "made.Part"] = {"options": made.options, "rules": made.rules}
