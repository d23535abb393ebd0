"""The networks that a file's names and shapes are compared with: those of the installed libraries, from the tables.

Networks that only the installed version of a library has are built to find their shapes, which needs torch; those in
the table are unchanged, since published weights must go on fitting.
"""

import time
from collections.abc import Container, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from hookscope.models.names import DEMO, torchvision_names
from hookscope.models.network_table import NetworkPattern, network_table

# Our choice: timm has more than a thousand networks, and importing it has taken seconds already.
TIMM_SECONDS = 20.0


def torchvision_patterns() -> Iterator[NetworkPattern]:
    """Yield torchvision's networks, and `demo` if its package is there."""
    table = network_table("torchvision")
    same = installed_version("torchvision") == table.version
    for name in (each for each in table.networks if each != DEMO) if same else torchvision_names():
        pattern = table.networks.get(name) or _built(name)
        if pattern is not None:
            yield pattern
    if find_spec("efficientnet_lite_pytorch"):
        yield table.networks[DEMO]


def timm_patterns(names: Container[str], left: list[str]) -> Iterator[NetworkPattern]:
    """Yield timm's networks.

    Those that are not in the table come last, and only if their first layer has one of `names`; `left` collects those
    for which no time was left.
    """
    table = network_table("timm")
    if installed_version("timm") == table.version:
        yield from table.networks.values()
        return
    from hookscope.models import timm_zoo  # noqa: PLC0415 (an optional package, slow to import)

    started, others = time.monotonic(), []
    for name in timm_zoo.timm_names():
        if known := table.networks.get(f"timm:{name}"):
            yield known
        elif all(f"{first}.weight" in names for first in timm_zoo.names_in(timm_zoo.published(name).first_conv)):
            others.append(f"timm:{name}")
    left += others
    while left and time.monotonic() < started + TIMM_SECONDS:
        if (pattern := _built(left.pop(0))) is not None:
            yield pattern


def known_pattern(model: str) -> NetworkPattern | None:
    """Return the network of that name: torchvision's, "timm:NAME" or "demo"; None for another."""
    if model.startswith("timm:"):
        known = network_table("timm").networks.get(model)
        return known or _built(model)  # the tag of its weights may change its classes
    name = model.removeprefix("torchvision:").lower()
    return next((pattern for pattern in torchvision_patterns() if pattern.model == name), None)


@cache
def _built(model: str) -> NetworkPattern | None:
    from hookscope.models.known_networks import pattern_of, timm_network, torchvision_network  # noqa: PLC0415 (imports torchvision, which is slow)

    is_timm = model.startswith("timm:")
    return pattern_of(timm_network(model.removeprefix("timm:")) if is_timm else torchvision_network(model))


def installed_version(package: str) -> str | None:
    """Return a package's version without what its builds add, as in "0.25.0+cpu"; None if it is not installed."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None
