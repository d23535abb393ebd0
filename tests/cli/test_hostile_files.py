"""The command line with files made to harm, and files that are merely broken: right code, right sentence, no harm."""

import argparse
import ctypes
import functools
import io
import json
import os
import pickle
import re
import struct
import sys
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.cli.conftest import Ended, Run, names_below
from tests.fork_server import ForkServer
from tests.models import hostile
from tests.models.hostile import (
    ASSEMBLED,
    EXPORTED,
    GOOD,
    PAYLOADS,
    Call,
    Member,
    Storage,
    View,
    bomb,
    changed,
    flipped,
    good_and_raw,
    index_bytes,
    legacy_bytes,
    number,
    raw_safetensors,
    raw_torch,
    safetensors_bytes,
    sharded,
    stored_good,
    tensor_entry,
    tensor_file,
    torch_bytes,
    torch_members,
    torch_pickle,
    with_extra,
    zip_bytes,
)

# What torch says about switching its protection off, and what an uncaught exception looks like.
NEVER_SAID = ("weights_only", "allowlist", "add_safe_globals", "safe_globals", "Traceback", "\x1b", "\x00")

LEGACY_START = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"

AGAIN = "(download|save|write) it again"
REMEDY = ("state_dict", "--trust")
MISFIT = "does not fit"


@dataclass(frozen=True, slots=True)
class Case:
    """A file, and how a command has to end that reads it.

    Attributes:
        name: What is wrong with it.
        make: Returns the content for the file at a path; or makes what is at the path itself, and returns None.
        code: The exit code.
        phrases: Regular expressions, whatever their case, for the error: the problem and the remedy.
        options: More arguments for the command.
        file: What the file is called.
    """

    name: str
    make: Callable[[Path], bytes | None]
    code: int
    phrases: tuple[str, ...]
    options: tuple[str, ...] = ()
    file: str = "model.pt"


def canary_of(path: Path) -> Path:
    """What the payload of the file at `path` creates."""
    return path.with_name("canary")


def holding(content: bytes) -> Callable[[Path], bytes]:
    return lambda _: content


def case(name: str, content: bytes, *phrases: str, code: int = 3, file: str = "model.pt") -> Case:
    return Case(name, holding(content), code, phrases, file=file)


# -------------------------------------------------------------------------------------------------- files that run code

# What pickle calls them in a file, where that differs.
IMPORTED = {
    "os.system": r"(posix|os)\.system",
    "subprocess.Popen": r"(subprocess|commands)\.Popen",
    "subprocess.run": r"(subprocess|commands)\.(run|Popen)",
    "builtins.eval": r"\beval",
    "builtins.exec": r"\bexec",
    "__import__": r"\b(getattr|__import__)",
    "importlib.import_module": r"\b(getattr|importlib\.import_module)",
    "operator.attrgetter": r"(operator|_operator)\.attrgetter|importlib\.import_module",
    "operator.methodcaller": r"(operator|_operator)\.methodcaller",
    "functools.partial": r"(functools|_functools)\.partial",
    "pathlib.Path.touch": r"pathlib|getattr",
    "torch.save": r"torch\.(serialization\.)?save",
    "numpy.save": r"numpy|\bopen",
}


def payload(name: str, write: Callable[..., bytes] = torch_bytes, **options: Any) -> Callable[[Path], bytes]:
    """Weights with a payload beside them."""
    return lambda path: write({**GOOD, "payload": PAYLOADS[name](canary_of(path))}, **options)


def _legacy_parts(path: Path, evil: int) -> bytes:
    """A legacy file whose part number `evil`, of magic number, protocol, system, content and keys, is a payload."""
    parts, _ = hostile.legacy_parts({})
    parts[evil] = pickle.dumps(PAYLOADS["os.system"](canary_of(path)), 2)
    return b"".join(parts)


def bare(protocol: int) -> Callable[[Path], bytes]:
    return lambda path: pickle.dumps({"w": PAYLOADS["os.system"](canary_of(path))}, protocol)


def exported(kind: str) -> Callable[[Path], bytes]:
    return lambda path: hostile.exported_bytes(lambda members: EXPORTED[kind](members, canary_of(path)))


def broken(name: str, make: Callable[[Path], bytes | None], *phrases: str, file: str = "model.pt") -> Case:
    """A file that cannot be read, made for its path."""
    return Case(name, make, 3, phrases, file=file)


def runs(name: str, make: Callable[[Path], bytes | None], *phrases: str, file: str = "model.pt") -> Case:
    """A file that runs code when it is read."""
    return Case(name, make, 4, (*phrases, *REMEDY), file=file)


RUNNING = [
    *(
        runs(f"{name} in a {kind} file", payload(name, write), IMPORTED.get(name, re.escape(name)))
        for kind, write, names in (
            ("torch", torch_bytes, PAYLOADS),
            ("legacy", legacy_bytes, ("os.system", "builtins.eval")),
        )
        for name in names
    ),
    *(
        runs(f"protocol {number} in a torch file", payload("os.system", protocol=number), IMPORTED["os.system"])
        for number in (0, 4)
    ),
    *(
        runs(f"bare pickle of protocol {protocol}", bare(protocol), "pickle", IMPORTED["os.system"])
        for protocol in (0, 2)
    ),
    *(
        runs(
            f"opcode {name}",
            lambda path, write=write: zip_bytes(torch_members(write(canary_of(path)))),
            "" if name == "STACK_GLOBAL out of the memo" else r"system|argparse\.Namespace|\bmap\b|tuple",
        )
        for name, write in ASSEMBLED.items()
    ),
    *(
        runs(f"legacy, payload in part {part}", functools.partial(_legacy_parts, evil=part), IMPORTED["os.system"])
        for part in range(5)
    ),
    runs("torch's old tar", lambda path: hostile.tar_bytes(canary_of(path)), "tar"),
    runs("tar like a legacy file", lambda path: hostile.tar_bytes(canary_of(path), LEGACY_START), "tar"),
    runs("TorchScript with __setstate__", lambda path: hostile.torchscript_bytes(canary_of(path)), "TorchScript"),
    *(
        runs(f".pt2 with {kind}", exported(kind), "exported program", file=file)
        for kind, file in zip(EXPORTED, ("model.pt2", "model.pt", "model.pt2", "model.bin", "model.pt2"), strict=True)
    ),
    runs(
        "a shard that runs code",
        lambda path: shards_with(path, lambda _, folder: (folder / FIRST_BIN).write_bytes(payload("os.system")(path))),
        IMPORTED["os.system"],
        file="model.bin.index.json",
    ),
]


# --------------------------------------------------------------------------------------------------- archives that lie


def _second_root(path: Path) -> bytes:
    evil = torch_pickle({"w": PAYLOADS["os.system"](canary_of(path))})
    return zip_bytes([*torch_members(), Member("other/data.pkl", evil)])


def _twice(path: Path) -> bytes:
    evil = torch_pickle({"w": PAYLOADS["os.system"](canary_of(path))})
    return zip_bytes([*torch_members(), Member("archive/data.pkl", evil)])


def _with_member(name: str, **changes: Any) -> bytes:
    return zip_bytes(changed(torch_members(), name, **changes))


def _other(value: float) -> list[Member]:
    return torch_members({name: tensor + value for name, tensor in GOOD.items()})


def _cut(name: str, count: int) -> bytes:
    body = next(torch_member.body for torch_member in torch_members() if torch_member.name.endswith(name))
    return _with_member(name, body=body[:count])


def _without(name: str) -> bytes:
    return zip_bytes(torch_member for torch_member in torch_members() if not torch_member.name.endswith(name))


def _flipped_after(content: bytes, part: bytes, distance: int) -> bytes:
    return flipped(content, content.index(part) + distance)


def _shared(count: int) -> bytes:
    """Storages of 8 MiB that all are the same bytes of the file."""
    views, storages = stored_good()
    views |= {f"bomb{n}": View(Storage(f"bomb{n}", 2**21), (2**21,), (1,)) for n in range(count)}
    first = Member("archive/data/bomb0", bytes(2**23))
    rest = [Member(f"archive/data/bomb{n}", first.body, shares=True) for n in range(1, count)]
    return zip_bytes([*torch_members(torch_pickle(views), storages), first, *rest])


def _with_bomb() -> bytes:
    views, storages = stored_good()
    views["bomb"] = View(Storage("bomb", 2**29), (2**29,), (1,))
    return zip_bytes([*torch_members(torch_pickle(views), storages), bomb("archive/data/bomb")])


WHOLE = torch_bytes(GOOD)
FIRST_BYTES = GOOD["0.weight"].numpy().tobytes()
NOT_TORCHS = ("torch.save", "twice|compressed|refused|damaged|not where|claims")

ARCHIVES = [
    Case("data.pkl twice, the second one evil", _twice, 3, NOT_TORCHS),
    Case("data.pkl of another root", _second_root, 3, ("data.pkl",)),
    case("data.pkl in two cases", zip_bytes([*torch_members(), Member("archive/DATA.PKL", b"")]), *NOT_TORCHS),
    case("name cut by a null byte", zip_bytes([*torch_members(), Member("archive/x\0y", b"")]), *NOT_TORCHS),
    case("name that climbs", zip_bytes([*torch_members(), Member("archive/../../x", b"")]), *NOT_TORCHS),
    case("name with a workflow command", zip_bytes([*torch_members(), Member("archive/\n::error::x", b"")]), r"\\n"),
    broken(
        "bomb of 2 GiB as data.pkl",
        lambda _: zip_bytes([bomb("archive/data.pkl"), *torch_members()[1:]]),
        "compressed",
        "torch.save",
    ),
    broken("bomb of 2 GiB as a storage", lambda _: _with_bomb(), "compressed", "torch.save"),
    broken(
        "bomb that says it is not compressed",
        lambda _: zip_bytes([*torch_members()[1:], Member("archive/data.pkl", b"\x80\x02}.", size=2**31)]),
        "torch.save|damaged",
    ),
    Case("one storage under 64 names", lambda _: _shared(64), 3, ("more bytes than the file",)),
    case(
        "directory that only Python sees", hostile.two_directories(torch_members(), _other(100)), "directory|torch.save"
    ),
    case(
        "zip64 directory that only Python sees",
        hostile.two_zip64_records(torch_members(), _other(100)),
        "directory|torch.save",
    ),
    case("archive behind other bytes", b"#!/bin/sh\nexit 1\n" + WHOLE, "not a weights file|text"),
    case("archive before other bytes", WHOLE + bytes(100), "directory|torch.save|damaged"),
    case("two archives in a row", WHOLE + zip_bytes(_other(100)), "directory|torch.save|damaged"),
    case("bytes behind a zip comment", zip_bytes(torch_members(), b"comment") + b"x", "directory|torch.save|damaged"),
    case("flipped bit in the weights", _flipped_after(WHOLE, FIRST_BYTES, 99), "damaged", AGAIN),
    case("flipped bit in byteorder", _flipped_after(WHOLE, b"little", 2), "damaged", AGAIN),
    case("checksum of the directory wrong", _with_member("data/0", crc=1), "damaged", AGAIN),
    case("encrypted", _with_member("data.pkl", flags=1), "encrypted", "password|unpack|save it"),
    case("unknown compression", _with_member("data/0", method=14), "compress", "save it again"),
    case("no data.pkl", _without("data.pkl"), "not one that torch.save wrote", "weights"),
    case("no storage", _without("data/0"), "damaged", AGAIN),
    case("no storage at all", zip_bytes(torch_members(torch_pickle(stored_good()[0]))), "damaged|missing", AGAIN),
    case("short storage", _cut("data/0", 8), "damaged|short|larger|truncated", AGAIN),
    case("storage longer than it says", _with_member("data/0", body=FIRST_BYTES + bytes(8)), "damaged|bytes", AGAIN),
    case("data.pkl cut", _cut("data.pkl", 300), "damaged|truncated", AGAIN),
    case("invalid byte order", _with_member("byteorder", body=b"middle"), "damaged|byte order", AGAIN),
    case("zip cut in the middle", WHOLE[: len(WHOLE) // 2], "truncated", AGAIN),
    case("zip without its last byte", WHOLE[:-1], "truncated|damaged|directory", AGAIN),
    case("legacy cut in its pickles", legacy_bytes(GOOD)[:200], "truncated", AGAIN),
    case("legacy cut in its weights", legacy_bytes(GOOD)[:-100], "truncated", AGAIN),
    case("legacy with the last byte missing", legacy_bytes(GOOD)[:-1], "truncated", AGAIN),
]

# ---------------------------------------------------------------------------------------- pickles within the allow-list


def _laughs(levels: int = 40) -> object:
    laughs: object = [torch.zeros(1)]
    for _ in range(levels):
        laughs = [laughs] * 10
    return laughs


def _wrapped(levels: int) -> object:
    inner: object = GOOD
    for _ in range(levels):
        inner = {"model": inner, "ema": inner}
    return inner


def _self_reference() -> dict[str, object]:
    content: dict[str, object] = {}
    content["state_dict"] = content
    return content


def _with_bias(opcodes: bytes) -> bytes:
    """A torch file of `GOOD` whose "0.bias" is what these instructions make."""
    views, storages = stored_good()
    body = torch_pickle({name: view for name, view in views.items() if name != "0.bias"})
    storages.pop(str(list(GOOD).index("0.bias")))
    return zip_bytes(torch_members(body[:-1] + hostile.unicode_opcode("0.bias") + opcodes + b"s.", storages))


def _legacy_without_keys() -> bytes:
    """A legacy file whose list of storages, from which torch fills them, is empty."""
    parts, weights = hostile.legacy_parts(GOOD)
    return b"".join([*parts[:4], pickle.dumps([], 2), weights])


SIZES = b"c__builtin__\nbytearray\n"
TENSOR = b"ctorch\nTensor\n"


FOUR = b"K\x04\x85"  # (4,)

# What torch allows a file to call, and what then holds whatever memory held before.
UNINITIALISED = {
    "torch.Tensor": TENSOR + FOUR + b"R",
    "torch.FloatTensor": b"ctorch\nFloatTensor\n" + FOUR + b"R",
    "torch.FloatTensor by NEWOBJ": b"ctorch\nFloatTensor\n" + FOUR + b"\x81",
    "a call inside a call": (b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch\nFloatTensor\n" + TENSOR + FOUR + b"}tR"),
    **{
        f"a storage of {count} elements": (
            b"ctorch._utils\n_rebuild_tensor_v2\n(ctorch.storage\nTypedStorage\n"
            + bytes([0x4B, count, 0x85, 0x52, 0x4B, 0])  # (count,) REDUCE, offset 0
            + FOUR
            + b"K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
        )
        for count in (0, 4)
    },
}


def _encoded(text: str, encoding: str) -> bytes:
    return b"c_codecs\nencode\n" + hostile.unicode_opcode(text) + hostile.unicode_opcode(encoding) + b"\x86R"


def _sparse() -> torch.Tensor:
    """A sparse tensor whose indices are outside its shape once it is read again."""
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        return torch.sparse_coo_tensor(torch.tensor([[0, 10**9]]), torch.ones(2), (4,), check_invariants=False)


def _with_versions(versions: object) -> bytes:
    state = OrderedDict(GOOD)
    state._metadata = versions
    return torch_bytes(state)


def odd_view(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, *, count: int = 4, key: str = "b"
) -> bytes:
    """A torch file of `GOOD` and a view of a storage that is said to have `count` elements."""
    return with_extra("x", View(Storage(key, count), shape, stride, offset), {"b": bytes(4 * max(0, min(count, 4)))})


OUT_OF_BOUNDS = "damaged|storage|bounds|more|larger"

PICKLES = [
    case("stride bomb", odd_view((10**6, 10**6), (0, 0), count=1), "storage|elements|bytes"),
    case(
        "tensor larger than its storage",
        tensor_file({"0.weight": View(Storage("b", 1), (4, 3, 3, 3), (27, 9, 3, 1))}, {"b": bytes(4)}),
        OUT_OF_BOUNDS,
    ),
    case("offset behind the storage", odd_view((4,), (1,), 10**9), OUT_OF_BOUNDS),
    case("negative offset", odd_view((4,), (1,), -4), "damaged"),
    case("negative stride", odd_view((4,), (-1,)), "damaged"),
    case("negative size", odd_view((-4,), (1,)), "damaged"),
    case("size that overflows", odd_view((2**62, 4), (1, 1)), "damaged"),
    case("storage of 2^62 elements", odd_view((0,), (1,), count=2**62), "damaged"),
    case("storage key that climbs", odd_view((4,), (1,), key="../../x"), "damaged"),
    case("8 GiB from one call", good_and_raw(SIZES + number(2**33) + b"\x85R"), "misread|memory"),
    case("tensor that no storage backs", good_and_raw(TENSOR + b"K\x04\x85R"), "misread|storage"),
    *(
        case(f"uninitialised memory out of {name}", _with_bias(made), "misread|storage|damaged")
        for name, made in UNINITIALISED.items()
    ),
    case("legacy with a storage that nothing fills", _legacy_without_keys(), "damaged|misread|storage", AGAIN),
    case("complex numbers for real ones", torch_bytes(GOOD | {"0.bias": torch.ones(4, dtype=torch.complex64)}), MISFIT),
    case("keys whose hashes collide", raw_torch(hostile.colliding_keys()), "far longer"),
    case("key that takes years to hash", raw_torch(b"})q\x00" + b"h\x00\x86q\x00" * 60 + b"K\x01s"), "."),
    case(
        "text that takes minutes to encode",
        raw_torch(_encoded("".join(map(chr, range(0x1000, 0xA000))) * 2, "punycode")),
        ".",
    ),
    case("list in a list, 50,000 deep", raw_torch(b"]" * 50_000 + b"a" * 49_999), "list|damaged|deep"),
    case(
        "dict in a dict, 500 deep",
        torch_bytes(functools.reduce(lambda d, _: {"state_dict": d}, range(120), GOOD)),
        "tensors|deep",
    ),
    case("a billion laughs", torch_bytes({"state_dict": _laughs()}), "tensors"),
    case("weights under 2^40 paths", torch_bytes(_wrapped(40)), "tensors|deep|--key"),
    case("dict that holds itself", torch_bytes(_self_reference()), "tensors"),
    case("empty dict", torch_bytes({}), "tensors", "nothing|empty"),
    case("int", torch_bytes(5), "int", "state dict"),
    case("a single tensor", torch_bytes(torch.ones(2)), "tensor", "state dict"),
    case(
        "tensors of the meta device",
        torch_bytes({k: v.to("meta") for k, v in GOOD.items()}),
        "meta|without data",
        "save",
    ),
    case("sparse tensor with indices out of its shape", torch_bytes({**GOOD, "0.bias": _sparse()}), "damaged|sparse"),
    case(
        "optimiser only",
        torch_bytes(torch.optim.Adam(hostile.network().parameters()).state_dict()),
        "optimi[sz]er",
        "state dict",
    ),
    case("numbers instead of tensors", torch_bytes(dict.fromkeys(GOOD, 1.0)), "tensors"),
    case("weights of another dtype than numbers", torch_bytes(GOOD | {"0.bias": ["a"] * 4}), MISFIT),
    case("of another network", torch_bytes(nn.Linear(3, 3).state_dict()), MISFIT, "another network"),
    case("module versions that are none", _with_versions({"": {"version": "x"}}), code=0),
]

# ---------------------------------------------------------------------------------------------------------- safetensors


def _header(**entries: object) -> dict[str, object]:
    """The header of `GOOD`, changed."""
    header: dict[str, object] = {}
    start = 0
    for name, tensor in GOOD.items():
        header[name] = tensor_entry(start, start + tensor.nbytes, tensor.shape)
        start += tensor.nbytes
    return header | entries


GOOD_BODY = b"".join(tensor.numpy().tobytes() for tensor in GOOD.values())
SAFE = safetensors_bytes(GOOD)


def tensors_file(name: str, content: bytes, *phrases: str) -> Case:
    return case(f"safetensors: {name}", content, *phrases, file="model.safetensors")


DAMAGED = ("damaged|truncated", AGAIN)

SAFETENSORS = [
    tensors_file("header longer than the limit", raw_safetensors(_header(), GOOD_BODY, 100_000_001), "."),
    tensors_file("header longer than the file", raw_safetensors(_header(), GOOD_BODY, 90_000_000), *DAMAGED),
    tensors_file("empty header", raw_safetensors(b"", b"", 0), "."),
    tensors_file("cut in its length", SAFE[:7], "truncated|bytes long"),
    tensors_file("cut in its tensors", SAFE[:-1], *DAMAGED),
    tensors_file("a byte too many", SAFE + b"\0", *DAMAGED),
    tensors_file(
        "overlap", raw_safetensors({"a": tensor_entry(0, 8, (2,)), "b": tensor_entry(4, 12, (2,))}, bytes(12)), *DAMAGED
    ),
    tensors_file(
        "hole", raw_safetensors({"a": tensor_entry(0, 8, (2,)), "b": tensor_entry(12, 20, (2,))}, bytes(20)), *DAMAGED
    ),
    tensors_file(
        "offsets beyond the file", raw_safetensors({"a": tensor_entry(0, 4096, (1024,))}, bytes(16)), *DAMAGED
    ),
    tensors_file("offsets the wrong way round", raw_safetensors({"a": tensor_entry(8, 0, (2,))}, bytes(8)), *DAMAGED),
    tensors_file("shape of other size", raw_safetensors({"a": tensor_entry(0, 8, (3,))}, bytes(8)), *DAMAGED),
    tensors_file("shape that overflows", raw_safetensors({"a": tensor_entry(0, 8, (2**62, 8))}, bytes(8)), *DAMAGED),
    tensors_file("negative shape", raw_safetensors({"a": tensor_entry(0, 8, (-2,))}, bytes(8)), *DAMAGED),
    tensors_file("unknown dtype", raw_safetensors({"a": tensor_entry(0, 8, (2,), "F99")}, bytes(8)), "."),
    tensors_file(
        "a tensor of 10^18 empty rows",
        raw_safetensors(_header(x=tensor_entry(len(GOOD_BODY), len(GOOD_BODY), (10**18, 0))), GOOD_BODY),
        MISFIT,
    ),
    tensors_file(
        "one name twice",
        raw_safetensors(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
            b'"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
            bytes(16),
        ),
        ".",
    ),
    tensors_file("invalid JSON", raw_safetensors(b'{"a": {"dtype"', bytes(8)), *DAMAGED),
    tensors_file("JSON 100,000 deep", raw_safetensors(b'{"a":' + b"[" * 100_000), "."),
    tensors_file("invalid UTF-8", raw_safetensors(b'{"\xff\xfe": 1}', bytes(8)), *DAMAGED),
    tensors_file(
        "a lone surrogate for a name",
        raw_safetensors(b'{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
        ".",
    ),
    tensors_file("an entry that is no object", raw_safetensors({"a": 5}), *DAMAGED),
    tensors_file("metadata of numbers", raw_safetensors({"__metadata__": {"a": 5}, **_header()}, GOOD_BODY), *DAMAGED),
    tensors_file("no tensors", safetensors_bytes({}), "no tensors"),
    tensors_file("a cut pickle under its name", torch_bytes({"x": argparse.Namespace()})[:30], "truncated|damaged"),
    runs("safetensors: a pickle under its name", payload("os.system"), IMPORTED["os.system"], file="model.safetensors"),
    *(
        tensors_file(
            f"names of {framework}",
            safetensors_bytes({name: torch.zeros(3) for name in names}),
            "TensorFlow|Keras|Flax|JAX",
            "convert|PyTorch",
        )
        for framework, names in {
            "Flax": ("params/Dense_0/kernel", "params/Dense_0/bias", "batch_stats/BatchNorm_0/mean"),
            "TensorFlow": ("conv2d/kernel:0", "conv2d/bias:0", "batch_normalization/moving_mean:0"),
        }.items()
    ),
]

# ----------------------------------------------------------------------------------------------- names that are hostile


def named(key: object) -> bytes:
    return torch_bytes({**GOOD, key: torch.ones(1)})


NAMES = [
    case(f"name: {name}", named(key), phrase, MISFIT if isinstance(key, str) else ".")
    for name, key, phrase in (
        ("workflow command", "::stop-commands::x", "stop-commands"),
        ("old workflow command", "##[error]x", r"\[error\]x"),
        ("ANSI colour", "\x1b[31mred", r"\\x1b\[31mred"),
        ("closing markup", "[/nope]", r"\[/nope\]"),
        ("markup", "[bold red]x[/]", r"\[bold red\]x\[/\]"),
        ("lone surrogate", "a\ud800b", r"\\ud800"),
        ("right to left", "\u202egnp.exe", r"\\u202e"),
        ("5,000 characters", "x" * 5000, "x{20,200}[^x]"),
        ("case collision", "0.WEIGHT", "0.WEIGHT"),
        ("empty", "", "unknown"),
        ("braces", "{0.__class__}", r"\{0"),
        ("number", 5, "5"),
        ("tuple", ("a", "\x1b[31m"), "tuple"),
        ("NaN", float("nan"), "nan"),
        ("tensor", torch.ones(2), "tensor"),
    )
] + [
    case("names that become one as text", torch_bytes({**GOOD, 5: torch.zeros(1), "5": torch.ones(1)}), "5"),
    case(
        "names that become one without a prefix",
        torch_bytes({**GOOD, **{f"module.{k}": v + 1 for k, v in GOOD.items()}}),
        MISFIT,
    ),
    case(
        "hostile names beside the weights",
        torch_bytes({"state_dict": GOOD, "\n::error::x": 1, "\x1b[31m": [1], 7: 8}),
        code=0,
    ),
    case("weights under a tensor", torch_bytes({torch.ones(2): GOOD, torch.ones(2): 1}), "."),
    case("hostile name around the weights", torch_bytes({"\n::error::x\x1b[31m": GOOD}), code=0),
    case(
        "hostile prefix", torch_bytes({f"\x1b[31m\n::error::.{name}": tensor for name, tensor in GOOD.items()}), code=0
    ),
]

# ---------------------------------------------------------------------------------------------- not weights, or no file


def _plain_tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("readme.txt"))
    return buffer.getvalue()


def _npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.ones(2))
    return buffer.getvalue()


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _png() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (3, 3)).save(buffer, "png")
    return buffer.getvalue()


# Each of these has to have a sentence of its own.
FOREIGN = [
    case("empty file", b"", "is empty", "again"),
    case("HTML page", b"<!DOCTYPE html><html><body>404</body></html>", "HTML", "download"),
    case(
        "Git LFS pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n", "LFS", "git lfs pull"
    ),
    case("JSON", b'{"model": 1}', "JSON", "weights file"),
    case("gzip", b"\x1f\x8b\x08\x00" + bytes(40), "gzip", "unpack"),
    case("ONNX", b"\x08\x08\x12\x07pytorch\x1a\x052.0.0" + bytes(40), "ONNX", "convert|PyTorch"),
    case("Keras HDF5", b"\x89HDF\r\n\x1a\n" + bytes(90), "HDF5", "Keras", file="model.h5"),
    case("image", _png(), "PNG", "weights"),
    case("JPEG", b"\xff\xd8\xff\xe0" + bytes(40), "JPEG image"),
    case("HEIF", b"\0\0\0\x18ftypheic" + bytes(20), "HEIF"),
    case("torch.package", zip_bytes([Member("p/.data/extern_modules", b"")]), "torch.package archive", "state dict"),
    case("npz", _npz(), "npz|NumPy", "weights|torch.save"),
    case("npy", b"\x93NUMPY\x01\x00" + bytes(100), "NumPy array", "weights"),
    case(
        "Keras archive",
        zip_bytes([Member("metadata.json", b"{}"), Member("config.json", b"{}"), Member("model.weights.h5", b"x")]),
        "Keras",
        "PyTorch",
    ),
    case("another zip", zip_bytes([Member("word/document.xml", b"<x/>")]), "zip", "torch.save"),
    case("zip without members", zip_bytes([]), "zip", "again|weights"),
    case("another tar", _plain_tar(), "tar", "unpack"),
    case("text", b"not a model\n" * 10, "text"),
    case("zeros", bytes(4096), "zero", AGAIN),
    case("noise", np.random.default_rng(0).bytes(4096), "not a weights file"),
    case("TensorFlow Lite", struct.pack("<L", 28) + b"TFL3" + bytes(60), "TensorFlow Lite"),
    case("GGUF", b"GGUF\x03\0\0\0" + bytes(60), "GGUF"),
    broken("folder", Path.mkdir, "folder", "give"),
    broken("dangling link", _link("nowhere.pt"), "link", "nowhere.pt"),
    Case("looping link", _link("model.pt"), 3, ("link",)),
    broken("FIFO", os.mkfifo, "FIFO|pipe", "regular file|weights file"),
    broken("device", _link("/dev/zero"), "device", "regular file|weights file"),
    Case("nothing", lambda _: None, 3, ("does not exist",)),
    Case("below a file", lambda _: None, 3, ("not a directory|does not exist",), file="net.py/model.pt"),
    Case("name too long", lambda _: None, 3, ("too long|does not exist",), file="x" * 300 + ".pt"),
    Case("name with a null byte", lambda _: None, 3, ("not a path|does not exist",), file="a\0b.pt"),
]

FILE_NAMES = [
    Case(f"file called {name}", holding(torch_bytes({})), 3, ("no tensors", phrase), file=file)
    for name, file, phrase in (
        ("like a workflow command", "\n::error::x.pt", r"\\n::error::x\.pt"),
        ("in colour", "\x1b[31mred.pt", r"\\x1b\[31mred\.pt"),
        ("no text", os.fsdecode(b"\xff.pt"), r"\\udcff\.pt"),
    )
]

# --------------------------------------------------------------------------------------------------------------- shards

FIRST = "model-00001-of-00002.safetensors"
FIRST_BIN = "model-00001-of-00002.bin"
Change = Callable[[dict[str, Any], Path], object]


def shards_with(path: Path, change: Change) -> None:
    """Write `GOOD` in shards, changed, with its index at `path`."""
    sharded(path.parent, change, ".bin" if path.name.endswith(".bin.index.json") else ".safetensors")


def shards(name: str, change: Change, *phrases: str) -> Case:
    return Case(
        f"index: {name}", lambda path: shards_with(path, change), 3, phrases, file="model.safetensors.index.json"
    )


def _first_is(name: object) -> Change:
    return lambda weight_map, _: weight_map.update({"0.weight": name, "0.bias": name})


def _replaced(by: Callable[[Path], object]) -> Change:
    def change(_: dict[str, Any], folder: Path) -> None:
        (folder / FIRST).unlink()
        by(folder / FIRST)

    return change


def index(name: str, content: bytes, *phrases: str) -> Case:
    return case(f"index: {name}", content, *phrases, file="model.safetensors.index.json")


ESCAPES = "next to it|refused"
NO_INDEX = "index|JSON"

SHARDS = [
    shards("climbing shard", _first_is(f"../{FIRST}"), r"\.\./", ESCAPES),
    shards("absolute shard", _first_is("/etc/passwd"), "/etc/passwd", ESCAPES),
    shards("shard of a URL", _first_is("https://example.invalid/x.safetensors"), "example.invalid"),
    shards(
        "missing shard",
        _first_is("model-00009-of-00002.safetensors"),
        "model-00009-of-00002",
        "lacks|missing",
        "download",
    ),
    shards("empty name", _first_is(""), "."),
    shards("name with a null byte", _first_is("a\0b.safetensors"), r"\\x00"),
    shards("name that is a number", _first_is(5), "."),
    shards("name with a workflow command", _first_is("\n::error::x\x1b[31m.safetensors"), r"\\n::error::x\\x1b"),
    shards(
        "key in two shards",
        lambda _, folder: (folder / FIRST).write_bytes(
            safetensors_bytes({name: GOOD[name] for name in list(GOOD)[:3]})
        ),
        "2.weight",
        "two|twice|both|also|more than one|not",
    ),
    shards("key that its shard lacks", lambda weight_map, _: weight_map.update({"2.weight": FIRST}), "2.weight"),
    shards("key in no shard", lambda weight_map, _: weight_map.update({"9.weight": FIRST}), "9.weight"),
    shards("itself", _first_is("model.safetensors.index.json"), "index"),
    shards(
        "an index of another index",
        _replaced(lambda path: path.write_bytes(index_bytes({"a": "b.safetensors"}))),
        "index|JSON",
    ),
    shards("shard that is a FIFO", _replaced(os.mkfifo), "FIFO|pipe"),
    shards("shard that is a device", _replaced(lambda path: path.symlink_to("/dev/zero")), "device|link"),
    shards(
        "shard that is a link to something else outside", _replaced(lambda path: path.symlink_to("/etc/passwd")), FIRST
    ),
    shards("shard that is cut", _replaced(lambda path: path.write_bytes(SAFE[:100])), FIRST, "truncated|damaged"),
    runs(
        "index: shard that is TorchScript",
        lambda path: shards_with(
            path, lambda _, folder: (folder / FIRST_BIN).write_bytes(hostile.torchscript_bytes(canary_of(path)))
        ),
        "TorchScript",
        file="model.bin.index.json",
    ),
    index("no tensors", index_bytes({}), NO_INDEX),
    index("weight_map is a list", index_bytes([FIRST]), NO_INDEX),
    index("no weight_map", b"{}", NO_INDEX),
    index("of 100,000 brackets", b'{"weight_map": ' + b'{"a":' * 100_000, "JSON"),
    index("with a number of 5,000 digits", b'{"weight_map": ' + b"9" * 5000 + b"}", "JSON"),
    index("cut", index_bytes({"0.weight": FIRST})[:-5], "JSON|truncated"),
    index("not UTF-8", b'{"weight_map": {"\xff\xfe": "a"}}', "JSON"),
    index("configuration", b'{"architectures": ["ResNet"], "model_type": "resnet"}', "configuration"),
]


def _without_member(members: dict[str, bytes], ending: str) -> None:
    del members[next(name for name in members if name.endswith(ending))]


def _cut_member(members: dict[str, bytes], ending: str) -> None:
    name = next(member for member in members if member.endswith(ending))
    members[name] = members[name][:-9]


def _exported(change: Callable[[dict[str, bytes]], None]) -> Callable[[Path], bytes]:
    return lambda _: hostile.exported_bytes(change)


def _script() -> bytes:
    return hostile.scripted_bytes(hostile.good_network())


def _flipped_script(_: Path) -> bytes:
    return _flipped_after(_script(), FIRST_BYTES, 99)


def pickled(imported: bytes) -> bytes:
    """A torch file that makes an object of a class, given as an instruction."""
    return zip_bytes(torch_members(b"\x80\x02" + imported + b"\n)R."))


def _broken_script(_: Path) -> bytes:
    """TorchScript whose program ends in the middle."""
    with zipfile.ZipFile(io.BytesIO(_script())) as archive:
        members = [Member(name, archive.read(name)) for name in archive.namelist()]
    code = next(member for member in members if b"def forward" in member.body)
    return zip_bytes(changed(members, code.name, body=code.body[:-40]))


# Trust is in whoever made a file, not in what happened to it since.
STILL_REFUSED = (
    *(
        "data.pkl twice, the second one evil",
        "bomb of 2 GiB as a storage",
        "flipped bit in the weights",
        "data.pkl cut",
    ),
    *("empty file", "FIFO"),
)
TRUSTED = [
    *(
        replace(each, name=f"{each.name}, trusted", options=("--trust",))
        for each in (*ARCHIVES, *FOREIGN)
        if each.name in STILL_REFUSED
    ),
    *(
        replace(each, name=f"trusted: {each.name}", options=("--trust",))
        for each in (
            broken("TorchScript with a flipped bit in its weights", _flipped_script, "damaged", AGAIN),
            broken("TorchScript with half a program", _broken_script, "TorchScript"),
            broken("TorchScript cut", lambda _: _script()[:-100], "truncated|damaged", AGAIN),
            broken(
                ".pt2 with a flipped bit in its weights",
                lambda _: _flipped_after(hostile.exported_bytes(dict), FIRST_BYTES, 99),
                "damaged",
                AGAIN,
            ),
            broken(".pt2 without its weights", _exported(lambda m: _without_member(m, "weight_0")), "exported program"),
            broken(".pt2 with a cut graph", _exported(lambda m: _cut_member(m, "model.json")), "exported program"),
            case("a class that is not installed", pickled(b"cno_such_module\nThing"), "no_such_module", "install"),
            case("a class that is gone", pickled(b"ctorch.nn\nNoSuchThing"), "NoSuchThing"),
            case("a call that fails", torch_bytes({"x": Call(len, 5)}), "has no len"),
            case("a call that leaves", torch_bytes({"x": Call(sys.exit, 0)}), "SystemExit"),
            case("a pickled number", pickle.dumps(5, 2), "int", "state dict"),
            case("a Module without data", torch_bytes(hostile.network().to("meta")), "meta|without data"),
        )
    ),
]

CASES = [*RUNNING, *ARCHIVES, *PICKLES, *SAFETENSORS, *NAMES, *FOREIGN, *FILE_NAMES, *SHARDS, *TRUSTED]

SLOW = "keys whose hashes collide"  # until the limit of the processor time for reading


# ---------------------------------------------------------------------------------------------------------------- tests


def prepare(case: Case, folder: Path) -> Path:
    """Make a case's file in a folder."""
    path = folder / case.file
    content = case.make(path)
    if content is not None:
        path.write_bytes(content)
    return path


def assert_harmless(ended: Ended) -> None:
    """Assert that nothing in the output steers a terminal or a log, or advises to switch protection off."""
    for stream in (ended.stdout, ended.stderr):
        assert not [word for word in NEVER_SAID if word in stream]
        lines = stream.split("\n")
        assert all(line.isprintable() for line in lines)
        assert not [line for line in lines if line.startswith("::") or "##[" in line]


def assert_ends_as_it_should(case: Case, ended: Ended) -> None:
    assert ended.code == case.code, ended
    assert_harmless(ended)
    if case.code == 0:
        assert not ended.errors
        return
    assert ended.stdout == ""
    [error] = ended.errors
    assert len(error) < 1500
    missing = [phrase for phrase in case.phrases if not re.search(phrase, error, re.IGNORECASE)]
    assert not missing, error


def test_there_are_enough_cases_and_each_has_a_name() -> None:
    names = [case.name for case in CASES]
    assert len(names) > 190
    assert len(set(names)) == len(names)


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case) -> set[str]:
    """Put the file of a case beside a folder for temporary ones; return the names of all that is there."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    if case.name == SLOW:
        monkeypatch.setattr("hookscope.checkpoints.isolation._SPARE_SECONDS", 1)
    prepare(case, tmp_path)
    return names_below(tmp_path)


# One case of each kind of file and of defect: `pytest -m exhaustive` reads the others.
ONE_OF_EACH = (
    *("os.system in a torch file", "functools.partial in a torch file", "builtins.eval in a legacy file"),
    *("protocol 4 in a torch file", "bare pickle of protocol 2", "opcode INST", "opcode BUILD"),
    *("opcode STACK_GLOBAL", "opcode a call hidden behind POP", "legacy, payload in part 3", "torch's old tar"),
    *("TorchScript with __setstate__", ".pt2 with pickled sample inputs", "a shard that runs code"),
    *("data.pkl twice, the second one evil", "data.pkl twice, the second one evil, trusted"),
    *("name that climbs", "bomb of 2 GiB as a storage", "one storage under 64 names"),
    *("directory that only Python sees", "archive behind other bytes", "flipped bit in the weights"),
    *("encrypted", "no data.pkl", "short storage", "data.pkl cut", "zip cut in the middle"),
    *("legacy cut in its weights", "stride bomb", "tensor larger than its storage", "negative stride"),
    *("size that overflows", "8 GiB from one call", "uninitialised memory out of torch.FloatTensor"),
    *("key that takes years to hash", "list in a list, 50,000 deep", "a billion laughs"),
    *("dict that holds itself", "empty dict", "tensors of the meta device"),
    *("sparse tensor with indices out of its shape", "optimiser only", "of another network"),
    *("safetensors: header longer than the limit", "safetensors: cut in its tensors", "safetensors: overlap"),
    *("safetensors: shape that overflows", "safetensors: one name twice", "safetensors: invalid JSON"),
    *("safetensors: a pickle under its name", "name: workflow command", "name: ANSI colour", "name: markup"),
    *("name: lone surrogate", "name: tuple", "hostile prefix", "empty file", "Git LFS pointer", "gzip"),
    *("image", "text", "folder", "dangling link", "FIFO", "device", "nothing", "file called in colour"),
    *("index: climbing shard", "index: missing shard", "index: key in two shards", "index: itself"),
    *("index: shard that is a FIFO", "index: not UTF-8", "index: of 100,000 brackets"),
    *("trusted: TorchScript cut", "trusted: a class that is gone", "trusted: a call that fails"),
)
# Those that `checkpoint` takes a way of its own with: what each reader of a file meets, damage, harm and bombs.
OF_EACH_READER = (
    *("os.system in a torch file", "builtins.eval in a legacy file", "bare pickle of protocol 2", "torch's old tar"),
    *("opcode STACK_GLOBAL", "TorchScript with __setstate__", ".pt2 with pickled sample inputs"),
    *("a shard that runs code", "data.pkl twice, the second one evil", "bomb of 2 GiB as a storage"),
    *("flipped bit in the weights", "encrypted", "data.pkl cut", "stride bomb", "tensor larger than its storage"),
    *("a billion laughs", "tensors of the meta device", "safetensors: overlap", "safetensors: cut in its tensors"),
    *("name: ANSI colour", "empty file", "folder", "FIFO", "index: climbing shard", "index: missing shard"),
)


@pytest.mark.timeout(180)  # a hang fails soon, a stopped machine does not
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.sample(*ONE_OF_EACH)
def test_a_hostile_or_broken_file_gets_its_sentence_and_does_nothing(
    run: Run, tmp_path: Path, case: Case, before: set[str]
) -> None:
    assert_ends_as_it_should(case, run("layers", case.file, "--arch", "net.py:tiny", *case.options))
    assert names_below(tmp_path) == before
    assert not canary_of(tmp_path / case.file).exists()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", [each for each in CASES if each.name in OF_EACH_READER], ids=lambda case: case.name)
def test_what_a_hostile_or_broken_file_holds_is_told_without_harm(
    run: Run, tmp_path: Path, case: Case, before: set[str]
) -> None:
    ended = run("checkpoint", case.file)
    assert ended.code in (0, 3, 4) or ("\0" in case.file and ended.code == 2), ended  # which no path can hold
    assert len(ended.errors) == (ended.code != 0)
    assert_harmless(ended)
    assert names_below(tmp_path) == before
    assert not canary_of(tmp_path / case.file).exists()


@pytest.mark.parametrize("hidden_by", ["the dict", "the tensor"])
def test_a_value_that_is_not_finite_is_counted_whatever_hides_it(run: Run, tmp_path: Path, hidden_by: str) -> None:
    state = OrderedDict(GOOD)
    state["0.bias"] = torch.tensor([0, float("nan"), 0, 0])
    if hidden_by == "the dict":
        content = hostile.with_shadows({"items": "Counter", "values": "Counter", "keys": "Counter"}, state)
    else:
        content = hostile.with_shadows({"is_floating_point": "set", "isnan": "set"}, state, on="0.bias")
    (tmp_path / "model.pt").write_bytes(content)
    ended = run("checkpoint", "model.pt", "--json")
    assert ended.code == 0, ended
    counts = {tensor["key"]: tensor["nan_count"] for tensor in json.loads(ended.stdout)["parts"][0]["tensors"]}
    assert counts == dict.fromkeys(GOOD, 0) | {"0.bias": 1}


def test_each_kind_of_other_file_has_a_sentence_of_its_own(run: Run, tmp_path: Path) -> None:
    sentences: dict[str, str] = {}
    for number_, case in enumerate(FOREIGN):
        folder = tmp_path / str(number_)
        folder.mkdir()
        prepare(case, folder)
        ended = run("layers", f"{number_}/{case.file}", "--arch", "net.py:tiny")
        sentences[case.name] = ended.stderr.replace(f"{number_}/", "").replace(case.file, "FILE")
    own = {name: said for name, said in sentences.items() if name not in ("nothing", "below a file", "name too long")}
    repeated = {name for name, said in own.items() if list(own.values()).count(said) > 1}
    assert not repeated


# -------------------------------------------------------------------------------------------- in separate processes


@pytest.fixture(scope="module")
def watch(fork_server: ForkServer, environment: dict[str, str], networks: Path) -> Callable[..., tuple[Ended, int]]:
    """Read a file in a process; return how that ended, and the most bytes that it, or what it started, ever held."""

    def run_watched(file: str, folder: Path, **variables: str) -> tuple[Ended, int]:
        (folder / "net.py").write_bytes(networks.read_bytes())
        arguments = ("-m", "hookscope", "layers", file, "--arch", "net.py:tiny")
        done = fork_server.run(*arguments, cwd=folder, environment=environment | variables)
        return Ended(done.returncode, done.stdout, done.stderr), done.peak_bytes

    return run_watched


@pytest.fixture(scope="module")
def plain_bytes(watch: Callable[..., tuple[Ended, int]], tmp_path_factory: pytest.TempPathFactory) -> int:
    """What a good file takes."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "model.pt").write_bytes(torch_bytes(GOOD))
    ended, peak_bytes = watch("model.pt", folder)
    assert ended.code == 0, ended
    return peak_bytes


# The least of these bombs takes eight times as much.
SPARE_BYTES = 2**28

BY_NAME = {case.name: case for case in CASES}
IN_A_PROCESS = (
    "bomb of 2 GiB as data.pkl",
    "bomb of 2 GiB as a storage",
    "8 GiB from one call",
    "os.system in a torch file",
    ".pt2 with pickled sample inputs",
    "file called no text",
)


@pytest.mark.parametrize("name", IN_A_PROCESS)
@pytest.mark.sample("os.system in a torch file")
def test_a_process_that_reads_it_ends_well_and_stays_small(
    watch: Callable[..., tuple[Ended, int]], plain_bytes: int, tmp_path: Path, name: str
) -> None:
    case = BY_NAME[name]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    prepare(case, tmp_path)
    ended, peak_bytes = watch(case.file, tmp_path, TMPDIR=str(temporary), TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
    assert_ends_as_it_should(case, ended)
    assert names_below(tmp_path) == {"net.py", "temporary", case.file}
    assert peak_bytes < plain_bytes + SPARE_BYTES


@pytest.mark.exhaustive
def test_sixty_million_instructions_end_within_limits(
    watch: Callable[..., tuple[Ended, int]], plain_bytes: int, tmp_path: Path
) -> None:
    (tmp_path / "model.pt").write_bytes(raw_torch(b"}" * 60_000_000))  # a dict takes 64 bytes
    ended, peak_bytes = watch("model.pt", tmp_path)
    assert_ends_as_it_should(Case("", holding(b""), 3, ("memory|time|more than|limit",)), ended)
    assert peak_bytes < plain_bytes + 2**30


def _without_privilege() -> None:
    """Let the process that comes next respect permissions, even root's."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


@pytest.mark.exhaustive
def test_a_file_without_permission_is_named_with_what_to_do(started: Run, networks: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_bytes(networks.read_bytes())
    (tmp_path / "model.pt").write_bytes(torch_bytes(GOOD))
    (tmp_path / "model.pt").chmod(0)
    ended = started("layers", "model.pt", "--arch", "net.py:tiny", cwd=tmp_path, preexec_fn=_without_privilege)
    assert_ends_as_it_should(Case("", holding(b""), 3, ("Permission denied", "readable|chmod")), ended)
