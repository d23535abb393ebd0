"""How results show themselves in a notebook: by a renderer that the package's front registers, and loads when asked."""

from collections.abc import Callable

RENDERERS: dict[str, Callable[[object], str]] = {}
"""By format: "html" takes a result and returns it for a notebook."""


def as_html(result: object) -> str:
    """Return a result as HTML."""
    return RENDERERS["html"](result)
