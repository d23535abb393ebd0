"""Choose weights for networks with a name, build these networks, and record both."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from hookscope.checkpoints.checkpoint import Checkpoint, FileOptions
from hookscope.checkpoints.fileformat import looks_like_file
from hookscope.errors import MisfitError, ModelError, UsageError
from hookscope.models.checkpoint import read_checkpoint
from hookscope.models.construction import (
    LoadedModel,
    parameter_count,
    seeded,
    silenced_known_warnings,
    skipped_initialisation,
)
from hookscope.models.download import DownloadError
from hookscope.models.input_spec import with_channels
from hookscope.models.statedict import load_into
from hookscope.parameters import arg
from hookscope.results.inputs import Preprocessing
from hookscope.results.network import ModelInfo
from hookscope.text import exception_line, printable


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How a network is built, and what is loaded into it.

    `weights` is "auto", "none", the name of trained weights, a state dict file, or one that has been read. `on_meta`
    builds what would be loaded, but without values, on the meta device, and downloads nothing; a quantised network,
    which cannot live there, gets random values on the CPU. `input_channels` is C of the pictures, if it is not 3.
    """

    weights: str | Checkpoint = "auto"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    on_meta: bool = False
    input_channels: int | None = None
    file: FileOptions = field(default_factory=FileOptions)

    @property
    def are_altered(self) -> bool:
        """Whether the network is to differ from the one that trained weights are for."""
        return bool(self.arguments) or self.input_channels is not None

    @property
    def weights_name(self) -> str | None:
        """The name of trained weights; None for "auto", "none" and a file."""
        weights = self.weights
        is_other = not isinstance(weights, str) or weights in ("auto", "none") or looks_like_file(weights)
        return None if is_other else str(weights)

    def file_weights(self) -> "ChosenWeights | None":
        """Return the weights of the file that `weights` names or is; None for "auto" and "none"."""
        read = self.weights
        if read in ("auto", "none"):
            return None
        return ChosenWeights.of_file(read_checkpoint(Path(read), self.file) if isinstance(read, str) else read)

    def usual_weights(self, name: str, trained: "Callable[[], ChosenWeights]", others: str = "") -> "ChosenWeights":
        """Return the weights for "auto", "none" and a file.

        `trained` returns the weights that the network's library recommends, or raises DownloadError. Raises UsageError
        for the name of trained weights; the message has `others`, about the names that exist.
        """
        if (weights := self.weights_name) is not None:
            raise UsageError(f"{name} has no weights '{printable(weights)}'; {others}give auto, none or a file.")
        reason = ""
        if self.weights == "auto":
            reason = f"trained weights are not used together with {arg('model_arg')} or other input channels."
            if not self.are_altered:
                try:
                    return trained()
                except DownloadError as error:
                    reason = str(error)
        elif (chosen := self.file_weights()) is not None:
            return chosen
        if self.on_meta:
            return ChosenWeights("not loaded")
        loud = f"{name}: weights are RANDOM (seed {self.seed}), so activations show no learnt features: {reason}"
        return ChosenWeights(f"random, seed {self.seed}", random=True, warnings=(loud,) if reason else ())


@dataclass(frozen=True, slots=True)
class ChosenWeights:
    """The weights of a network that has a name, and their origin, for people and the record.

    `published` is a library's description of its trained weights, for which its builder configures the network:
    torchvision's enum, timm's configuration. `checkpoint` is None for random weights, and if nothing is loaded.
    `is_file`: the weights are a file of the user's.
    """

    origin: str
    published: Any = None
    checkpoint: Checkpoint | None = None
    random: bool = False
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_file: bool = False

    @classmethod
    def of_file(cls, read: Checkpoint) -> "ChosenWeights":
        """Return the weights of a file of the user's."""
        return cls(read.name, checkpoint=read, warnings=read.warnings, notes=read.notes, is_file=True)

    def loaded(
        self,
        name: str,
        module: nn.Module,
        preprocessing: Preprocessing,
        categories: tuple[str, ...] = (),
        arguments: Mapping[str, Any] | None = None,
        *,
        warnings: tuple[str, ...] = (),
        notes: Iterable[str] = (),
    ) -> LoadedModel:
        """Return a network that has these weights, with its record."""
        sha256, count = self.checkpoint.sha256 if self.checkpoint else None, parameter_count(module)
        kind, arguments = type(module).__name__, dict(arguments or {})
        info = ModelInfo(name, kind, self.origin, self.random, sha256, count, categories, arguments)
        return LoadedModel(module, info, preprocessing, self.warnings + warnings, notes=(*self.notes, *notes))


Description = tuple[Preprocessing, tuple[str, ...], tuple[str, ...]]
"""The description of a built network: its preprocessing, class names by index, and warnings."""

IMAGENET_CLASSES = 1000


def load_named(
    name: str,
    chosen: ChosenWeights,
    options: BuildOptions,
    build: Callable[[], nn.Module],
    describe: Callable[[nn.Module], Description],
    *,
    quantised: bool = False,
) -> LoadedModel:
    """Build a network that has a name, for messages and the record, and load its weights.

    `describe` is given the network; `quantised`: building calibrates on what the parameters hold, and the network must
    stay on the CPU.
    """
    misfits, notes = list[str](), list[str]()
    keeps_initial_values = chosen.random or quantised or options.file.allow_missing
    with seeded(options.seed), silenced_known_warnings():
        with nullcontext() if keeps_initial_values else skipped_initialisation():
            module = build()
        if chosen.checkpoint and chosen.published is None:
            state, plain = chosen.checkpoint.state, name.removeprefix("timm:")
            misfits, notes = load_into(module, state, chosen.origin, options.file, name=plain)
    if options.on_meta and not quantised:
        module = module.to("meta")
    preprocessing, categories, warnings = describe(module)
    if chosen.checkpoint is not None and chosen.checkpoint.categories:
        categories = chosen.checkpoint.categories
    elif categories and chosen.is_file and chosen.published is None and options.file.allow_missing:
        categories = ()  # the head may be random
    elif categories and chosen.is_file and chosen.published is None:
        notes.append(f"{chosen.origin}: has as many classes as ImageNet, and takes ImageNet's class names.")
    if options.input_channels is not None:
        preprocessing = with_channels(preprocessing, options.input_channels)
    warnings = (*misfits, *warnings)
    return chosen.loaded(name, module, preprocessing, categories, options.arguments, warnings=warnings, notes=notes)


@contextmanager
def building(name: str, arguments: Mapping[str, Any], misfit: str = "") -> Iterator[None]:
    """Turn whatever a library's builder raises into one line.

    It is a UsageError where it was given arguments, else a MisfitError that begins with `misfit`, or a ModelError.
    """
    try:
        yield
    except Exception as error:
        if arguments:
            written = printable(", ".join(f"{key}={value!r}" for key, value in arguments.items()))
            raise UsageError(f"{name} cannot be built with {written}: {exception_line(error)}") from error
        if misfit:
            raise MisfitError(f"{misfit}: {exception_line(error)}") from error
        raise ModelError(f"{name} cannot be built: {exception_line(error)}") from error
