"""The class names that a user gives a network."""

from dataclasses import replace
from pathlib import Path

from hookscope.checkpoints.class_names import names_by_index, read_classes
from hookscope.errors import UsageError
from hookscope.models.construction import LoadedModel
from hookscope.options import ClassNames, ScoreOptions
from hookscope.text import counted, printable


def with_classes(loaded: LoadedModel, option: object) -> LoadedModel:
    """Return a network with the class names that options give, and with their `multi_label`.

    Raises InputError if a file cannot be read or does not name classes, UsageError if the names given do not.
    """
    if isinstance(option, ScoreOptions):
        loaded = replace(loaded, multi_label=option.multi_label)
    classes = option.classes if isinstance(option, ClassNames) else None
    if classes is None:
        return loaded
    if isinstance(classes, str | Path):
        path = Path(classes)
        names = read_classes(path)
        note = f"{counted(len(names), 'class name')} from {printable(path.name)}."
        loaded = replace(loaded, notes=(*loaded.notes, note))
    else:
        try:
            names = names_by_index(classes)
        except ValueError as error:
            raise UsageError(f"classes do not name the network's classes: {error}.") from error
    return replace(loaded, info=replace(loaded.info, categories=names))
