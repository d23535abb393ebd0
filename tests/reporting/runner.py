"""What GitHub's runner makes of the lines that a step prints, written from its rules.

Facts, from actions/runner, src/Runner.Common/ActionCommand.cs: a line is a command if, leading blanks aside, it starts
with "::", has another "::" further on, and what stands between begins with a known name. After a blank come properties,
separated by commas, with their values behind "=". Everything behind the second "::" is data. In data "%0D", "%0A" and
then "%25" are undone, in properties "%0D", "%0A", "%3A", "%2C" and then "%25". Failing that, a "##[" anywhere, followed
by a known name and a "]", makes a command in the old form.
"""

import re
from dataclasses import dataclass

KNOWN = {
    *("add-mask", "add-matcher", "add-path", "debug", "echo", "endgroup", "error", "group", "notice", "remove-matcher"),
    *("save-state", "set-env", "set-output", "stop-commands", "warning"),
}


@dataclass(frozen=True)
class Command:
    name: str
    properties: dict[str, str]
    data: str


def read_data(text: str) -> str:
    return text.replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")


def read_property(text: str) -> str:
    undone = text.replace("%0D", "\r").replace("%0A", "\n").replace("%3A", ":").replace("%2C", ",")
    return undone.replace("%25", "%")


def commands(output: str) -> list[Command]:
    """Return the commands in what a step printed; lines end as .NET reads them."""
    return [command for line in re.split("\r\n|\r|\n", output) if (command := _command(line))]


def _command(line: str) -> Command | None:
    line = line.lstrip()
    if line.startswith("::") and "::" in line[2:]:
        head, _, data = line[2:].partition("::")
        name, _, listed = head.partition(" ")
        if name.lower() in KNOWN:
            pairs = (word.partition("=") for word in listed.strip().split(","))
            return Command(
                name, {key: read_property(value) for key, _, value in pairs if key and value}, read_data(data)
            )
    old = re.search(r"##\[([^ \]]*)[^\]]*\](.*)", line)
    return Command(old[1], {}, old[2]) if old and old[1].lower() in KNOWN else None
