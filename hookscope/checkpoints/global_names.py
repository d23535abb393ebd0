"""The classes and functions that a pickle names: plain data, code that can run anything, and others. None is called."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

# Classes whose objects are data: an unpickler that makes them runs no code but theirs, and theirs only keeps values.
_DATA = frozenset(
    {
        *("argparse.Namespace", "types.SimpleNamespace", "typing.Any", "copyreg._reconstructor"),
        *("collections.defaultdict", "collections.Counter", "collections.deque", "collections.OrderedDict"),
        *(f"builtins.{name}" for name in ("object", "int", "float", "str", "bytes", "bool", "list", "tuple", "dict")),
        *(f"builtins.{name}" for name in ("set", "frozenset", "bytearray", "complex", "slice", "range")),
        *(f"datetime.{name}" for name in ("datetime", "date", "time", "timedelta", "timezone")),
        *("decimal.Decimal", "fractions.Fraction", "uuid.UUID"),
        *("numpy.ndarray", "numpy.dtype", "numpy.random._pickle.__randomstate_ctor"),
        *("numpy.random._pickle.__generator_ctor", "numpy.random._pickle.__bit_generator_ctor"),
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
        *(f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")),
        *("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig", "omegaconf.base.Metadata"),
        *("omegaconf.base.ContainerMetadata", "omegaconf.base.SCMode"),
        *("easydict.EasyDict", "addict.addict.Dict", "yacs.config.CfgNode", "mmengine.config.config.ConfigDict"),
        *("mmcv.utils.config.ConfigDict", "mmengine.logging.history_buffer.HistoryBuffer", "box.box.Box"),
        *("ml_collections.config_dict.config_dict.ConfigDict", "pytorch_lightning.utilities.parsing.AttributeDict"),
        *("lightning.pytorch.utilities.parsing.AttributeDict", "lightning_fabric.utilities.data.AttributeDict"),
        *("lightning.fabric.utilities.data.AttributeDict", "torch.torch_version.TorchVersion"),
        "torch.nn.parameter.Buffer",
    }
)
_DATA_PATTERNS = (
    re.compile(r"pathlib(\._local)?\.(Pure)?(Posix|Windows)?Path"),
    re.compile(r"omegaconf\.nodes\.[A-Z]\w*Node"),
    re.compile(r"numpy\.(bool_?|u?int\d+|float\d+|complex\d+|str_|bytes_)"),
    re.compile(r"numpy\.dtypes\.[A-Z]\w*DType"),
    re.compile(r"numpy\.random\._(pcg64|mt19937|philox|sfc64)\.[A-Z]\w*"),
)
_LAYERS = re.compile(r"torch\.nn\.modules\.\w+\.[A-Z]\w*")

# Modules that start programs, run text, import by name, load libraries, open files and sockets, or reach any of these.
_FORBIDDEN_MODULES = frozenset(
    {
        *("os", "posix", "nt", "sys", "subprocess", "_posixsubprocess", "commands", "popen2", "pty", "shutil"),
        *("builtins", "__builtin__", "operator", "_operator", "types", "inspect", "gc", "atexit", "signal", "logging"),
        *("importlib", "_frozen_importlib", "imp", "runpy", "pkgutil", "zipimport", "zipapp", "site", "sysconfig"),
        *("ctypes", "_ctypes", "cffi", "mmap", "socket", "_socket", "socketserver", "ssl", "asyncio", "selectors"),
        *("multiprocessing", "concurrent", "threading", "_thread", "sched", "queue", "platform"),
        *("code", "codeop", "ast", "bdb", "pdb", "trace", "profile", "cProfile", "timeit", "doctest", "pydoc"),
        *("marshal", "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "sqlite3", "dbm"),
        *("io", "_io", "tempfile", "fileinput", "linecache", "tarfile", "zipfile", "webbrowser", "antigravity"),
        *("urllib", "urllib2", "ftplib", "smtplib", "telnetlib", "xmlrpc", "requests", "httpx", "aiohttp", "paramiko"),
        *("pip", "setuptools", "pkg_resources", "distutils", "ensurepip", "venv", "idlelib", "lib2to3", "unittest"),
        *("tkinter", "turtle", "numba", "sympy", "execnet", "pexpect", "plumbum", "sh", "fabric"),
    }
)
_FORBIDDEN = re.compile(
    r"(http\.(client|server|cookiejar)"
    r"|torch\.(save|load|compile|ops|classes|serialization|hub|jit|package|export|fx|library|multiprocessing)"
    r"|torch\.(_dynamo|_inductor|_ops|_jit_internal|_C|testing|storage\._load_from_bytes)"
    r"|torch\.utils\.(cpp_extension|collect_env|data|bottleneck|model_zoo)"
    r"|torch\.distributed\.(rpc|run|launch|launcher|elastic)"
    r"|numpy\.(load|save\w*|loadtxt|genfromtxt|fromfile|memmap|vectorize|apply_\w+|fromregex|DataSource)"
    r"|numpy\.(lib|testing|f2py|ctypeslib|distutils)"
    r"|functools\.(partial\w*|reduce|singledispatch\w*|cached_property))\b"
)
# What a name may not lead through, wherever it begins: vendornet.os.system is os.system, argparse._os is os.
_FORBIDDEN_INSIDE = frozenset(
    {
        *("os", "posix", "nt", "sys", "subprocess", "builtins", "importlib", "runpy", "ctypes", "shutil", "socket"),
        *("pty", "pickle", "marshal", "eval", "exec", "execfile", "compile", "system", "popen", "getattr", "setattr"),
        *("open", "globals", "locals", "vars"),
    }
)


def is_data(name: str) -> bool:
    """Tell whether a name is a class that only holds data."""
    return name in _DATA or any(pattern.fullmatch(name) for pattern in _DATA_PATTERNS)


def is_layer(name: str) -> bool:
    """Tell whether a name is one of torch's own layers. A layer runs no code until it is called."""
    return _LAYERS.fullmatch(name) is not None


def is_forbidden(name: str) -> bool:
    """Tell whether a name can run anything, so it cannot be allowed: `os.system`, `builtins.exec` and the like."""
    if is_data(name) or is_layer(name):
        return False
    parts = re.sub(r"^__(mp_)?main__\.", "", name).split(".")  # classes of the script that saved the file
    through = any(part.lstrip("_") in _FORBIDDEN_INSIDE or re.fullmatch("__.*__", part, re.DOTALL) for part in parts)
    return parts[0] in _FORBIDDEN_MODULES or through or _FORBIDDEN.match(name) is not None


def refused_names(names: Iterable[str], allowed: Iterable[str] | None) -> list[str]:
    """Return the forbidden names; with `allowed`, also names that match none of its globs, except data and layers."""
    patterns = ["*"] if allowed is None else [*allowed]

    def is_allowed(name: str) -> bool:
        return is_data(name) or is_layer(name) or any(fnmatchcase(name, pattern) for pattern in patterns)

    return [name for name in names if is_forbidden(name) or not is_allowed(name)]
