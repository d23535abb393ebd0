"""Networks out of a folder that transformers' `save_pretrained` wrote: `config.json`, weights, preprocessing, labels.

transformers gets a configuration and tensors that hookscope has read; it opens no file of the folder, reaches no host,
and runs none of the code that a folder can bring (`auto_map`).
"""

import importlib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.checkpoints.checkpoint import FileOptions
from hookscope.checkpoints.class_names import stored_classes
from hookscope.checkpoints.fileformat import CONFIG, json_object, read_config, weights_file
from hookscope.errors import (
    CheckpointError,
    MisfitError,
    ModelError,
    ModelNotFoundError,
    UntrustedFileError,
    UsageError,
)
from hookscope.models.checkpoint import read_checkpoint
from hookscope.models.construction import LoadedModel, replaced, seeded, silenced_known_warnings
from hookscope.models.download import DownloadError
from hookscope.models.input_spec import default_preprocessing, with_channels
from hookscope.models.names import optional_package
from hookscope.models.statedict import converted, unfit_names
from hookscope.models.weight_choice import BuildOptions, ChosenWeights
from hookscope.parameters import arg
from hookscope.results.inputs import Preprocessing
from hookscope.text import exception_line, printable

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_CLASS = re.compile(r"[A-Z]\w*", re.ASCII)
_PICTURES = "pixel_values"
_RECORDINGS = "input_values"

# Settings that make transformers load something else: kernels from its hub, weights of a backbone, code of another
# library for quantised weights.
_DROPPED = frozenset({"attn_implementation", "experts_implementation", "name_or_path", "use_kernels", "kernel_config"})
_QUANTISED = "quantization_config"

_INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers

# Below this length ConvNeXt's processor scales more and crops: `ConvNextImageProcessor.resize` of transformers.
_UNCROPPED_SIDE = 384

_COUNTS_LAYERS = re.compile(r"(layers?|depths?)\Z")  # "num_hidden_layers", but not "layer_list_out_channels"
_MOST_LAYERS = 1000  # ours: published networks have a few hundred; a million take hours to build


def load_hugging_face(source: str, options: BuildOptions) -> LoadedModel:
    """Build the network that a folder's configuration names, with the weights of the folder.

    Raises UntrustedFileError if the folder asks for code of its own, UsageError without transformers,
    ModelNotFoundError for unknown classes, quantised weights, and networks that take neither pictures nor recordings,
    CheckpointError if the configuration is damaged, MisfitError if the weights do not fit it.
    """
    folder = Path(source)
    document = read_config(folder) or {}
    settings = _safe_settings(document, printable(str(folder / CONFIG)))
    processing = _processing(folder)
    advice = "A Hugging Face folder needs one more package: pip install 'hookscope[transformers]'"
    transformers = optional_package("transformers", advice)
    name = printable(folder.resolve().name, 80)
    if options.arguments:
        raise UsageError(f"{name} is built as its {CONFIG} has it, so it takes no {arg('model_arg')}.")
    with _quiet(transformers), seeded(options.seed), silenced_known_warnings():
        config, kind = _class_of(transformers, settings, printable(str(folder / CONFIG)))
        chosen = options.usual_weights(name, lambda: _trained_weights(folder, options.file))
        module, misfits, notes = _built(kind, config, chosen, options, name)
    if options.on_meta:
        module = module.to("meta")
    if type(size := processing.get("size")) is int and _is_squared(transformers, processing):
        processing["size"] = [size, size]
    preprocessing, remarks = _preprocessing(processing, config, module, name)
    categories = stored_classes(document)[1]
    labelled = categories if len(categories) == getattr(config, "num_labels", 0) and "labels" not in document else ()
    loaded = chosen.loaded(name, module, preprocessing, labelled, warnings=(*misfits, *remarks), notes=notes)
    return replace(loaded, training=chosen.checkpoint.training if chosen.checkpoint else None)


def _is_squared(transformers: Any, processing: Mapping[str, Any]) -> bool:
    """Tell whether one number as the size means a square, not the shorter side: image processors differ in this."""
    name = str(processing.get("image_processor_type") or processing.get("feature_extractor_type"))
    name = name.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast")
    processor = getattr(transformers, name, None) if name.endswith("ImageProcessor") else None
    return bool(getattr(processor, "default_to_square", not {"crop_size", "crop_pct", "max_size"} & {*processing}))


def _safe_settings(held: Mapping[str, Any], shown: str) -> dict[str, Any]:
    """Return a configuration without the settings that make transformers load or run anything else."""
    kept: dict[str, Any] = {}
    for key, value in held.items():
        if key == "auto_map":
            raise UntrustedFileError(
                f"{shown} asks for code that comes with the weights (auto_map), which is never run; name the network "
                "with a function of yours instead: net.py:build."
            )
        if key == _QUANTISED:
            raise ModelNotFoundError(
                f"{shown} describes quantised weights, which cannot be loaded here; give the unquantised ones."
            )
        counts = value if isinstance(value, list) else [value]
        if _COUNTS_LAYERS.search(key) and any(type(count) is int and count > _MOST_LAYERS for count in counts):
            raise CheckpointError(f"{shown} asks for more than {_MOST_LAYERS} layers ({printable(key, 80)}); refused.")
        if key.lstrip("_") in _DROPPED or key.lstrip("_").endswith("attn_implementation"):
            continue
        if key == "use_pretrained_backbone":
            kept[key] = False
        elif isinstance(value, dict):
            kept[key] = _safe_settings(value, shown)
        else:
            kept[key] = value
    return kept


def _processing(folder: Path) -> dict[str, Any]:
    for name in _PROCESSORS:
        path = folder / name
        if not path.is_file():
            continue
        shown, document = printable(str(path)), json_object(path)
        if document is None:
            raise CheckpointError(f"{shown} is not the JSON that transformers writes; download it again.")
        inner = document.get("image_processor") or document.get("feature_extractor")
        document = inner if isinstance(inner, dict) else document
        if "auto_map" in document:
            raise UntrustedFileError(f"{shown} asks for code that comes with it (auto_map), which is never run.")
        return document
    return {}


@contextmanager
def _quiet(transformers: ModuleType) -> Iterator[None]:
    talk = transformers.utils.logging
    verbosity, bars = talk.get_verbosity(), talk.is_progress_bar_enabled()
    hub = importlib.import_module("huggingface_hub.constants")
    modules = importlib.import_module("transformers.dynamic_module_utils")
    with ExitStack() as stack:
        stack.enter_context(replaced(hub, "HF_HUB_OFFLINE", True))
        if hasattr(modules, "TIME_OUT_REMOTE_CODE"):
            stack.enter_context(replaced(modules, "TIME_OUT_REMOTE_CODE", 0))
        talk.set_verbosity_error()
        talk.disable_progress_bar()
        try:
            yield
        finally:
            talk.set_verbosity(verbosity)
            if bars:
                talk.enable_progress_bar()


def _class_of(transformers: ModuleType, settings: Mapping[str, Any], shown: str) -> tuple[Any, Any]:
    model_type, names = settings.get("model_type"), settings.get("architectures")
    mapping = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    version = f"transformers {transformers.__version__}"
    if not isinstance(model_type, str) or model_type not in mapping:
        raise ModelNotFoundError(
            f"{shown} has the type '{printable(str(model_type), 60)}', which {version} does not have."
        )
    name = names[0] if isinstance(names, list) and names else None
    try:
        config = mapping[model_type].from_dict(dict(settings))
    except Exception as error:
        cause = exception_line(error.__cause__ or error, 200)  # a validator's own message has several lines
        raise CheckpointError(f"{shown} is not what {version} takes: {cause}") from error
    kind: Any = getattr(transformers, name, None) if isinstance(name, str) and _CLASS.fullmatch(name) else None
    if name is None:
        kind = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_MAPPING.get(type(config), None)
    is_network = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_network:
        raise ModelNotFoundError(f"{shown} names '{printable(str(name), 80)}', which is no network of {version}.")
    if getattr(kind, "main_input_name", "") in (_PICTURES, _RECORDINGS):
        return config, kind
    vision = getattr(transformers, f"{kind.__name__.removesuffix('Model')}VisionModel", None)
    if vision is None or not hasattr(config, "vision_config"):
        raise ModelNotFoundError(
            f"{kind.__name__} of {shown} takes {kind.main_input_name}, not pictures (pixel_values) or "
            f"recordings (input_values). Give FILE.py:FUNCTION that builds it, and its inputs with {arg('input')}."
        )
    return config.vision_config, vision


def _trained_weights(folder: Path, options: FileOptions) -> ChosenWeights:
    path = weights_file(folder)
    if path == folder:
        raise DownloadError("there are none in the folder.")
    return ChosenWeights.of_file(read_checkpoint(path, options))


def _built(
    kind: Any, config: Any, chosen: ChosenWeights, options: BuildOptions, name: str
) -> tuple[nn.Module, list[str], list[str]]:
    try:
        if chosen.checkpoint is None:
            return kind(config).eval(), [], []
        tensors = {key: value for key, value in chosen.checkpoint.state.items() if isinstance(value, Tensor)}
        has_text = any(name.startswith("text_model.") for name in tensors)
        own = "vision_model." if has_text and kind.__name__.endswith("VisionModel") else ""
        state = {name: value for name, value in tensors.items() if name.startswith(own)}
        module, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:
        raise ModelError(f"{name} raised while {kind.__name__} was built: {exception_line(error)}") from error
    differing = {
        key: f"{printable(key, 80)}: file {tuple(stored)}, network {tuple(own)}"
        for key, stored, own in sorted(info["mismatched_keys"])
    }
    missing, unexpected = sorted(map(str, info["missing_keys"])), sorted(map(str, info["unexpected_keys"]))
    if info["error_msgs"]:
        raise MisfitError(f"{chosen.origin} does not fit {kind.__name__}: {printable(str(info['error_msgs'][0]))}")
    names = chosen.origin, f"{chosen.origin} does not fit {kind.__name__}"
    unfit = unfit_names(names, missing, unexpected, differing, options.file)
    dtypes = [(value.dtype, torch.float32) for value in state.values() if value.is_floating_point()]
    return module.eval(), unfit, converted(chosen.origin, dtypes)


def _preprocessing(
    processing: Mapping[str, Any], config: Any, module: nn.Module, name: str
) -> tuple[Preprocessing, tuple[str, ...]]:
    if module.main_input_name == _RECORDINGS:
        return _of_recordings(processing, default_preprocessing(module), name), ()
    channels = getattr(config, "num_channels", 3)
    try:
        if processing:
            return _described(processing, channels, name)
        side = _sides(getattr(config, "image_size", None))
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        where = "an image processor" if processing else f"pictures in its {CONFIG}"
        raise CheckpointError(f"{name} has settings of {where} that are not transformers'.") from error
    if side is None:
        return default_preprocessing(module), ()
    return with_channels(Preprocessing(resize=side, crop=side, source=f"{CONFIG} of {name}"), channels), ()


def _of_recordings(settings: Mapping[str, Any], usual: Preprocessing, name: str) -> Preprocessing:
    rate = settings.get("sampling_rate")
    if rate is not None and (type(rate) is not int or not 0 < rate < 2**24):
        raise CheckpointError(f"{name} has the sampling rate {printable(str(rate), 60)}, which is not a sampling rate.")
    if usual.waveform is None or rate is None:
        return usual
    waveform = replace(usual.waveform, sampling_rate=rate, is_normalised=settings.get("do_normalize", True) is True)
    return replace(usual, waveform=waveform, source=f"the feature extractor of {name}")


def _described(settings: Mapping[str, Any], channels: int, name: str) -> tuple[Preprocessing, tuple[str, ...]]:
    warnings = []
    size = settings.get("size") if settings.get("do_resize", True) else None
    resize, crop = _resize(size), None
    if isinstance(size, dict) and "longest_edge" in size:
        does = f"scales the shorter side to {resize}, without that limit" if resize else "does not resize pictures"
        warnings.append(
            f"{name}: transformers keeps the longer side within {int(size['longest_edge'])} pixels; hookscope {does}."
        )
    if "crop_pct" in settings and isinstance(resize, int) and settings["crop_pct"]:
        side = resize
        crop = (side, side)
        resize = int(side / float(settings["crop_pct"])) if side < _UNCROPPED_SIDE else (side, side)
    if settings.get("do_center_crop") and (sides := _sides(settings.get("crop_size"))):
        crop = sides
    scale = settings.get("rescale_factor", 1 / 255)
    if not settings.get("do_rescale", True) or abs(float(scale) - 1 / 255) > 1e-6:
        warnings.append(f"{name}: transformers does not scale pixels to [0, 1]; hookscope does.")
    if settings.get("do_flip_channel_order"):
        warnings.append(f"{name}: transformers gives the network BGR pictures; hookscope gives RGB.")
    filtering = _INTERPOLATIONS.get(settings.get("resample", 2))
    if filtering is None and resize is not None:
        warnings.append(f"{name}: transformers resizes with a filter that hookscope lacks, so hookscope uses bilinear.")
    normalised = settings.get("do_normalize", True) and settings.get("image_mean") and settings.get("image_std")
    mean, std = (_floats(settings[key]) if normalised else () for key in ("image_mean", "image_std"))
    described = Preprocessing(
        resize=resize,
        crop=crop,
        interpolation=filtering or "bilinear",
        mean=mean,
        std=std,
        source=f"the image processor of {name}",
    )
    return with_channels(described, channels), tuple(warnings)


def _resize(size: object) -> int | tuple[int, int] | None:
    if isinstance(size, dict) and "shortest_edge" in size:
        return _side(size["shortest_edge"])
    return _side(size) if isinstance(size, int) else _sides(size)


def _sides(size: object) -> tuple[int, int] | None:
    if isinstance(size, dict):
        return (_side(size["height"]), _side(size["width"])) if "height" in size else None
    if isinstance(size, list | tuple) and len(size) == 2:
        return _side(size[0]), _side(size[1])
    return None if size is None else (_side(size), _side(size))


def _side(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**20:
        raise ValueError
    return value


def _floats(values: object) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
        raise TypeError
    floats = tuple(map(float, values))
    if not all(map(math.isfinite, floats)):
        raise ValueError
    return floats
