"""`hookscope.survey` over a folder, beside a loop over torch's DataLoader that only runs the network."""

import tempfile
from functools import partial
from pathlib import Path

import hookscope
from benchmarks.comparing import Budget, Ready, over_first, timeable
from benchmarks.findings import Section
from benchmarks.networks import seeded
from benchmarks.throughput import WORKERS, bare_loop, same_inputs, write_photographs
from benchmarks.timing import interleaved
from hookscope.inputs import find_inputs

_NETWORK, _COUNT, _BATCH_SIZE, _LAYER = "resnet18", 256, 32, "layer4"
_ROUNDS = 5
_EVERY, _FEATURES = "hookscope, every layer", f"hookscope, features of {_LAYER}"
_BUDGETS: dict[str, Budget] = {_EVERY: (1.25, None), _FEATURES: (1.10, None)}

_NOTE = f"""\
The photographs and the loop of the section on pictures per second. "{_EVERY}" is `hookscope.survey` with its defaults,
without the self-check: statistics of every channel of every leaf, and the inputs that excite it most. "{_FEATURES}"
surveys that block alone and writes its pooled outputs."""


def measure() -> Section:
    """Measure a survey of every layer, and one layer's features."""
    model, _ = seeded(_NETWORK)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "photographs")
        folder.mkdir()
        write_photographs(folder, _COUNT)
        paths = find_inputs([str(folder)])
        work = same_inputs(paths[:_BATCH_SIZE], _BATCH_SIZE)
        survey = partial(
            hookscope.survey, model, folder, batch_size=_BATCH_SIZE, workers=WORKERS, resize=256, crop=224, verify=False
        )
        features = partial(survey, layer=_LAYER, features=Path(name, "features.safetensors"))
        ways = {
            f"DataLoader, {WORKERS} workers": Ready(
                None, partial(bare_loop, model, paths, _BATCH_SIZE, WORKERS), _ROUNDS
            ),
            _EVERY: Ready(work, survey, _ROUNDS),
            _FEATURES: Ready(work, features, _ROUNDS),
        }
        subject = f"{_NETWORK}, {_COUNT} pictures, {_BATCH_SIZE} at a time"
        found = over_first(subject, ways, interleaved(*timeable(ways)), _BUDGETS)
    return Section("hookscope.survey over a folder", _NOTE, tuple(found))
