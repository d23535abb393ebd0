"""The command line as a whole: its commands, and the exit code of every ending."""

import atexit
import errno
import gc
import os
import signal
import sys
import traceback
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn, TextIO

import typer

from hookscope import options
from hookscope.cli.check import check
from hookscope.cli.console import report
from hookscope.cli.doctor import doctor
from hookscope.cli.options import with_options
from hookscope.cli.run_commands import GradsCommand, activations, attention, attribute, diff, grads, history, survey
from hookscope.cli.sections import SectionedCommand
from hookscope.cli.small_commands import checkpoint, layers, models
from hookscope.cli.small_commands import report as report_command
from hookscope.cli.watch import WatchCommand, watch
from hookscope.commands.watch.script import Script
from hookscope.errors import (
    EXIT_BROKEN_PIPE,
    EXIT_BUG,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    HookscopeError,
    InputError,
    OutputError,
    Terminated,
    UsageError,
    is_out_of_memory,
)
from hookscope.text import printable

# How often a thread of GNU OpenMP, torch's on Linux, looks for work before it lets go of its core. By default it does
# so for about a millisecond, in which it keeps busy cores from the threads that it waits for. With two threads on two
# cores, beside two busy processes, a forward pass of resnet18 takes 2,100 ms by default and 56 ms with this number; on
# idle cores 15 and 16 ms.
_SPINS = "1000"

# Importing torch makes 340,000 objects that stay. After every 700 new ones Python would look for garbage among them,
# which is a seventh of what `hookscope activations resnet34` takes; after so many it takes no more memory.
_NEW_OBJECTS = 10_000

# Names that people write, and the option or argument that they mean.
_CALLED_OTHERWISE = {
    **dict.fromkeys(("--size", "--img-size", "--image-size", "--imgsz"), "--resize"),
    **dict.fromkeys(("--class", "--label", "--class-index"), "--target"),
    **dict.fromkeys(("--layers", "--module", "--modules", "--name"), "--layer"),
    **dict.fromkeys(("--checkpoint", "--ckpt", "--state-dict", "--pretrained"), "--weights"),
    **dict.fromkeys(("--output", "--output-dir", "--outdir", "--save-dir"), "--out"),
    **dict.fromkeys(("--gpu", "--cuda", "--cpu"), "--device"),
    **dict.fromkeys(("--batch", "--bs"), "--batch-size"),
    **dict.fromkeys(("--half", "--fp16", "--bf16", "--precision"), "--dtype"),
    **dict.fromkeys(("--html", "--page"), "--report"),
    **dict.fromkeys(("--shape", "--input-size"), "--input-shape"),
    **dict.fromkeys(("--colormap", "--palette"), "--cmap"),
    **dict.fromkeys(("--model", "--network", "--net"), "MODEL"),
    **dict.fromkeys(("--image", "--images", "--picture", "--img", "--data", "--path"), "IMAGE"),
}

# Least likeness of a misspelt option: bisct to bisect 0.91, laier to layer 0.8; but meta to mean 0.75.
_MISSPELT = 0.8

_STREAM_FAILURES = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)

app = typer.Typer(
    name="hookscope",
    help="""See what happens inside a PyTorch network.

    Give it a model and an image: it hooks the layers you name, runs the model once, and writes feature-map grids,
    shapes and statistics to disk. Give it a loss, and it also runs backward and measures gradients. It draws where
    the network looks, and finds where two networks begin to differ.

    \b
    hookscope activations demo cat.jpg --layer conv
    hookscope grads model.pt --loss mse
    hookscope attribute demo cat.jpg --target tabby
    hookscope attention vit_b_16 cat.jpg
    hookscope diff old.pt new.pt cat.jpg
    hookscope check 'checkpoints/*.pt' --junit junit.xml
    hookscope checkpoint model.safetensors
    hookscope history 'ckpt/epoch_*.pt'
    hookscope survey resnet18 photos/
    hookscope watch train.py -- --lr 0.1
    hookscope layers resnet34 --layer 'layer4.*'
    hookscope models 'resnet*'
    """,
    epilog="Exit codes: 0 done, 1 a check failed, 2 usage, 3 a file cannot be read or written, 4 refused as unsafe, "
    "5 nothing matched, 6 the model raised, 70 a bug in hookscope.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for _command, _summary, _kind in (
    (activations, "Draw feature maps and measure activations.", SectionedCommand),
    (grads, "Measure gradients and report what is wrong with them.", GradsCommand),
    (attribute, "Draw where a network looks in a picture.", SectionedCommand),
    (attention, "Show what a transformer's attention looks at.", SectionedCommand),
    (diff, "Find where two networks begin to differ.", SectionedCommand),
    (check, "Run checkpoints and judge them by rules, for CI.", SectionedCommand),
    (checkpoint, "List the tensors in a weights file.", SectionedCommand),
    (history, "Find the first checkpoint at which a training broke.", SectionedCommand),
    (survey, "Measure what channels do over a data set.", SectionedCommand),
    (watch, "Run a training script unchanged, and watch it.", WatchCommand),
    (layers, "List the modules of a network with shapes and costs.", SectionedCommand),
    (models, "List the names that MODEL accepts.", SectionedCommand),
    (doctor, "List what is installed and what is missing.", SectionedCommand),
    (report_command, "Make one HTML page of a run.", SectionedCommand),
):
    app.command(_command.__name__, cls=_kind, short_help=_summary)(with_options(_command))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hookscope {version('hookscope')}")
        raise typer.Exit


@app.callback()
def _hookscope(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Hold the options that come before a command."""


def main() -> NoReturn:
    """Run the command line and exit with the code its ending means."""
    if sys.argv[1:2] == ["watch"]:
        _watch_script()
    gc.set_threshold(_NEW_OBJECTS)
    signal.signal(signal.SIGTERM, _terminate)
    if "OMP_WAIT_POLICY" not in os.environ:  # an equivalent setting
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process has closed it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        getattr(sys, name).reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            code = _stream_failed(error, stream)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Taking the interpreter apart takes half a second once torch is loaded.
    atexit._run_exitfuncs()  # noqa: SLF001 - runs what others have registered with atexit
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _watch_script() -> NoReturn:
    """Run the script of `hookscope watch` with the signals, streams, environment and exit of plain Python."""
    excepthook = sys.excepthook
    result = _result(sys.argv[1:])
    sys.excepthook = excepthook  # typer has set its own
    if isinstance(result, Script):
        try:
            result.run()
        except UsageError as error:
            sys.exit(report(error))
        sys.exit()
    sys.exit(result if isinstance(result, int) else EXIT_DONE)


def run(arguments: Sequence[str]) -> int:
    """Run one command line, given without the program's name, and return its exit code.

    Any code but 0 comes with a message on stderr. Without arguments it prints a greeting in a terminal; elsewhere it
    prints the help and returns a usage error.
    """
    result = _result(arguments)
    return result if isinstance(result, int) else EXIT_DONE


def _result(arguments: Sequence[str]) -> object:
    try:
        if not arguments and sys.stdin and sys.stdin.isatty() and sys.stdout.isatty():
            from hookscope.cli.greeting import greeting

            typer.echo(greeting(Path()))
            return EXIT_DONE
        result = app(args=list(arguments) or ["--help"], prog_name="hookscope", standalone_mode=False)
    except SystemExit as error:
        # Both typer and Rich answer a closed pipe with exit code 1, which would look like a failed check.
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return _stream_failed(error.__context__, sys.stdout)
    except BaseException as error:  # noqa: BLE001 - any ending has its exit code
        return _ended_by(error)
    return result if arguments else UsageError.exit_code


def _ended_by(error: BaseException) -> int:
    if isinstance(error, typer.Abort):  # typer's word for Ctrl-C, but for any EOFError too
        error = error.__cause__ or error
    if isinstance(error, HookscopeError):
        code = report(error)
    elif hasattr(error, "format_message"):
        code = report(_wrong_usage(error))
    elif isinstance(error, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
    elif isinstance(error, Terminated):
        code = EXIT_TERMINATED
    elif isinstance(error, OSError) and error.filename is None and error.errno in _STREAM_FAILURES:
        code = _stream_failed(error, sys.stdout)
    elif is_out_of_memory(error):
        code = report(InputError("There is not enough memory. Give the command more, or smaller inputs."))
    else:  # whatever is left is a bug, and must not look like a failed check
        with suppress(OSError):
            traceback.print_exception(error)
            typer.echo("hookscope: this is a bug in hookscope. Please report it with the lines above.", err=True)
        code = EXIT_BUG
    return code


def _wrong_usage(error: Any) -> UsageError:
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", "")
    parameters = [] if context is None else context.command.params
    names = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
    # "No such command 'model'. Did you mean 'models'?."
    said, *_ = error.format_message().removesuffix(".").partition(" (Possible options")  # click guesses wildly
    sentence = _wrong_value(error) or _right_name(option, names, parameters) or said
    hint = _hint_about_inputs(sentence, option, names, "" if context is None else context.info_name)
    sentence += hint.removeprefix(".") if sentence.endswith("?") else hint
    if context and sentence.startswith("No such command") and not sentence.endswith("?"):
        sentence += f". Commands are {', '.join(context.command.list_commands(context))}"
    path = context.command_path if context else "hookscope"
    return UsageError(f"{sentence}{'' if sentence.endswith('?') else '.'} See `{path} --help`.")


def _right_name(option: str, names: Collection[str], parameters: Sequence[Any]) -> str:
    """Return a sentence with the right name of an unknown option, if the command has it; else ""."""
    alike = get_close_matches(option.strip("-"), sorted(name.strip("-") for name in names), 1, _MISSPELT)
    meant = _CALLED_OTHERWISE.get(option) or "".join(f"--{name}" for name in alike)
    if meant.startswith("--"):
        return f"No such option: {option}. Did you mean {meant}?" if meant in names else ""
    is_argument = meant and any(meant in (parameter.metavar or "") for parameter in parameters)
    return f"{option} is not an option: {meant} is given without one" if is_argument else ""


def _hint_about_inputs(sentence: str, option: str, names: Collection[str], command: str) -> str:
    """Return a hint for an extra argument or an unknown option that a script or forward may take; else ""."""
    if command == "watch" and sentence.startswith(("No such option", "Got unexpected extra")):
        return ". Arguments of the script follow --: `hookscope watch train.py -- --lr 0.1`"
    if command == "survey" and option in ("--input", "--input-shape"):
        return ". A survey takes files; put several arguments of forward as a dict or a tuple in one .pt file"
    if "--input" not in names:
        return ""
    if sentence.startswith("Got unexpected extra argument"):
        return ". Inputs of this command are --input-shape SHAPE or --input NAME=FILE"
    name = option.removeprefix("--").replace("-", "_")
    is_unknown = sentence.startswith("No such option") and "Did you mean" not in sentence
    kinds = [kind for kind in vars(options).values() if is_dataclass(kind)]
    # A user hardly means an option of another command for the network.
    elsewhere = {field.name for kind in kinds for field in fields(kind)}
    may_be_an_argument = is_unknown and option.startswith("--") and name.isidentifier()
    if not may_be_an_argument or name.removeprefix("no_") in elsewhere:
        return ""
    return f". If it is an argument of forward, write --input {name}=VALUE"


def _wrong_value(error: Any) -> str:
    """Return the option with the wrong value and the reason, as typer prints the reason alone; "" for other errors."""
    from pydantic import ValidationError

    option = next(iter(getattr(getattr(error, "param", None), "opts", ())), "")
    if not option.startswith("-") or not isinstance(error.__cause__, ValidationError):
        return ""
    wrong = error.__cause__.errors()[0]
    if wrong["type"] == "value_error":  # typer's own words: "'training' is not one of 'eval', 'train'"
        return f"{option} {wrong['msg'].removeprefix('Value error, ')}".removesuffix(".")
    return f"{option} '{printable(str(wrong['input']))}' {wrong['msg'].removeprefix('Input ').partition(',')[0]}"


def _stream_failed(error: OSError, stream: TextIO) -> int:
    """Silence a stream that cannot be written, as Python would fail on it again at exit; return the exit code."""
    with suppress(OSError):  # a stream without a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if error.errno == errno.EPIPE:  # the reader has closed the pipe
        return EXIT_BROKEN_PIPE
    return report(OutputError(f"Standard output cannot be written: {error.strerror}."))


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated
