"""Write hostile and broken weights files. The test that uses one writes it; none is ever committed.

A file's content is made by a function of a canary: a path that the file's payload creates when it runs. All of them
belong to the small network of `GOOD`, so that what is wrong with them is the one thing that their name says.
"""

import functools
import importlib
import io
import itertools
import json
import operator
import os
import pickle
import pickletools
import runpy
import struct
import subprocess
import tarfile
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

GIBIBYTE = 2**30


def network() -> nn.Sequential:
    """The network that every file here is for: a copy of `tiny` in the command line tests' net.py."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2), nn.ReLU())


def good_state() -> dict[str, torch.Tensor]:
    """Weights of `network` whose values are known: 0, 1/8, 2/8, … in the order of the state dict."""
    state, start = {}, 0
    for name, tensor in network().state_dict().items():
        state[name] = (torch.arange(start, start + tensor.numel()) / 8).reshape(tensor.shape)
        start += tensor.numel()
    return state


GOOD = good_state()


def torch_bytes(content: object, protocol: int = 2) -> bytes:
    """What torch.save writes today: a zip archive."""
    buffer = io.BytesIO()
    torch.save(content, buffer, pickle_protocol=protocol)
    return buffer.getvalue()


def legacy_bytes(content: object, protocol: int = 2) -> bytes:
    """What torch.save wrote until 1.5: pickles, then the storages."""
    buffer = io.BytesIO()
    torch.save(content, buffer, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def legacy_parts(content: object) -> tuple[list[bytes], bytes]:
    """Return the five pickles at the start of a legacy file (magic, protocol, system, content, keys), and the rest."""
    whole = legacy_bytes(content)
    ends = [0]
    for _ in range(5):
        *_, (_, _, position) = pickletools.genops(whole[ends[-1] :])
        ends.append(ends[-1] + position + 1)
    return [whole[start:end] for start, end in itertools.pairwise(ends)], whole[ends[-1] :]


def safetensors_bytes(state: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    return safetensors.torch.save(dict(state), metadata)


def raw_safetensors(header: object, body: bytes = b"", claimed: int | None = None) -> bytes:
    """A safetensors file with any header: an object to write as JSON, or bytes; `claimed` lies about its length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text + body


def tensor_entry(start: int, stop: int, shape: Sequence[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


class Call:
    """Unpickling it calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments

    def __call__(self) -> None:
        """Be something that pickle takes for a function, when another call's function comes out of this one."""


def _touch(canary: Path) -> str:
    return f"touch '{canary}'"


def _script(canary: Path) -> str:
    return f"open({str(canary)!r}, 'w').close()"


def _module_that_touches(canary: Path) -> str:
    """Write a Python module that creates the canary when it is imported; return its path."""
    path = canary.with_name("payload.py")
    path.write_text(_script(canary), encoding="utf-8")
    return str(path)


# What runs when the file is unpickled as torch.load did by default until 2.6.
PAYLOADS: dict[str, Callable[[Path], Any]] = {
    "os.system": lambda canary: Call(os.system, _touch(canary)),
    "subprocess.Popen": lambda canary: Call(subprocess.Popen, ["touch", str(canary)]),
    "subprocess.run": lambda canary: Call(subprocess.run, ["touch", str(canary)]),
    "builtins.eval": lambda canary: Call(eval, _script(canary)),
    "builtins.exec": lambda canary: Call(exec, _script(canary)),
    "__import__": lambda canary: Call(Call(getattr, Call(__import__, "os"), "system"), _touch(canary)),
    "importlib.import_module": lambda canary: Call(
        Call(getattr, Call(importlib.import_module, "os"), "system"), _touch(canary)
    ),
    "runpy.run_path": lambda canary: Call(runpy.run_path, _module_that_touches(canary)),
    "operator.attrgetter": lambda canary: Call(
        Call(Call(operator.attrgetter, "system"), Call(importlib.import_module, "os")), _touch(canary)
    ),
    "operator.methodcaller": lambda canary: Call(Call(operator.methodcaller, "touch"), canary),
    "functools.partial": lambda canary: Call(functools.partial(os.system, _touch(canary))),
    "pathlib.Path.touch": lambda canary: Call(Path.touch, canary),
    "torch.save": lambda canary: Call(torch.save, {}, str(canary)),
    "numpy.save": lambda canary: Call(importlib.import_module("numpy").save, _npy(canary), 0),
}


def _npy(canary: Path) -> Any:
    return Call(open, str(canary), "wb")


def colliding_keys(count: int = 60_000) -> bytes:
    """Instructions for a dict whose keys all hash to 0, so that each is compared with all before it."""
    keys = ((at * (2**61 - 1)).to_bytes(10, "little") for at in range(1, count))  # Python hashes modulo this prime
    return b"}(" + b"".join(b"\x8a\x0a" + key + b"N" for key in keys) + b"u"


def unicode_opcode(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded  # BINUNICODE


# The same call in other instructions of the pickle machine.
ASSEMBLED: dict[str, Callable[[Path], bytes]] = {
    "INST": lambda canary: b"(" + unicode_opcode(_touch(canary)) + b"ios\nsystem\n.",
    "OBJ": lambda canary: b"\x80\x02(cos\nsystem\n" + unicode_opcode(_touch(canary)) + b"o.",
    # tuple.__new__ uses up an iterator that calls
    "NEWOBJ": lambda canary: (
        b"\x80\x02c__builtin__\ntuple\nc__builtin__\nmap\ncos\nsystem\n"
        + unicode_opcode(_touch(canary))
        + b"\x85\x86\x81\x85\x81."
    ),
    "NEWOBJ_EX": lambda canary: (
        b"\x80\x04cbuiltins\ntuple\ncbuiltins\nmap\ncos\nsystem\n"
        + unicode_opcode(_touch(canary))
        + b"\x85\x86}\x92\x85}\x92."
    ),
    # the first BUILD gives an object a __setstate__, the second calls it
    "BUILD": lambda canary: (
        b"\x80\x02cargparse\nNamespace\n)\x81}"
        + unicode_opcode("__setstate__")
        + b"cos\nsystem\nsb"
        + unicode_opcode(_touch(canary))
        + b"b."
    ),
    "STACK_GLOBAL": lambda canary: b"\x80\x04\x8c\x02os\x8c\x06system\x93" + unicode_opcode(_touch(canary)) + b"\x85R.",
    "STACK_GLOBAL out of the memo": lambda canary: (
        b"\x80\x04\x8c\x06system\x94\x8c\x02os\x94h\x01h\x00\x93" + unicode_opcode(_touch(canary)) + b"\x85R."
    ),
    "a call hidden behind POP": lambda canary: b"\x80\x02cos\nsystem\n" + unicode_opcode(_touch(canary)) + b"\x85R0}.",
}


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a zip archive, with every field that can lie.

    Attributes:
        name: As both headers give it.
        body: What lies in the file.
        method: 0 stored, 8 deflated.
        size: Claimed size once unpacked; None for the truth about a stored one.
        crc: Claimed checksum; None for that of `body`.
        flags: General purpose bits; 1 is "encrypted".
        shares: Use the bytes of the member written before it.
    """

    name: str
    body: bytes
    method: int = 0
    size: int | None = None
    crc: int | None = None
    flags: int = 0
    shares: bool = False


def _header_fields(member: Member) -> bytes:
    crc = zlib.crc32(member.body) if member.crc is None else member.crc
    size = len(member.body) if member.size is None else member.size
    name = member.name.encode()
    return struct.pack(
        "<HHHHHLLLHH", 20, member.flags, member.method, 0, 0x21, crc, len(member.body), size, len(name), 0
    )


def zip_parts(members: Iterable[Member]) -> tuple[bytes, bytes, int]:
    """Return the local part of an archive, its directory, and the number of members."""
    local, directory, count, offset = io.BytesIO(), io.BytesIO(), 0, 0
    for member in members:
        name, fields = member.name.encode(), _header_fields(member)
        if not member.shares:
            offset = local.tell()
            local.write(b"PK\x03\x04" + fields + name + member.body)
        directory.write(b"PK\x01\x02" + struct.pack("<H", 20) + fields)
        directory.write(struct.pack("<HHHLL", 0, 0, 0, 0, offset) + name)
        count += 1
    return local.getvalue(), directory.getvalue(), count


def end_record(count: int, directory_bytes: int, offset: int, comment: bytes = b"") -> bytes:
    fields = struct.pack("<HHHHLLH", 0, 0, count, count, directory_bytes, offset, len(comment))
    return b"PK\x05\x06" + fields + comment


def zip_bytes(members: Iterable[Member], comment: bytes = b"") -> bytes:
    local, directory, count = zip_parts(members)
    return local + directory + end_record(count, len(directory), len(local), comment)


def two_directories(shown: Iterable[Member], read: Iterable[Member]) -> bytes:
    """An archive whose end record points at one directory while another lies before it, where Python looks."""
    shown_local, shown_directory, shown_count = zip_parts(shown)
    read_local, read_directory, read_count = zip_parts(read)
    assert shown_count == read_count
    assert len(shown_directory) == len(read_directory)
    # Python takes the distance between the two for bytes put in front of the archive, and adds it to every offset.
    front = read_local + read_directory
    return front + shown_local + shown_directory + end_record(read_count, len(read_directory), len(read_local))


def two_zip64_records(shown: Iterable[Member], read: Iterable[Member]) -> bytes:
    """An archive with two zip64 end records: one before the locator, where Python looks, one where it points."""
    shown_local, shown_directory, count = zip_parts(shown)

    def record(size: int, offset: int) -> bytes:
        return b"PK\x06\x06" + struct.pack("<QHHLLQQQQ", 44, 45, 45, 0, 0, count, count, size, offset)

    moved = io.BytesIO()
    moved.write(shown_local + shown_directory)
    offsets = []
    directory = io.BytesIO()
    for member in read:
        offsets.append(moved.tell())
        name, fields = member.name.encode(), _header_fields(member)
        moved.write(b"PK\x03\x04" + fields + name + member.body)
        directory.write(b"PK\x01\x02" + struct.pack("<H", 20) + fields)
        directory.write(struct.pack("<HHHLL", 0, 0, 0, 0, offsets[-1]) + name)
    at = moved.tell()
    moved.write(directory.getvalue())
    pointed_at = moved.tell()
    moved.write(record(len(directory.getvalue()), at))
    # The directory that Python finds has to end where the record before the locator begins.
    start = moved.tell()
    moved.write(shown_directory)
    moved.write(record(len(shown_directory), start))
    moved.write(b"PK\x06\x07" + struct.pack("<LQL", 0, pointed_at, 1))
    moved.write(b"PK\x05\x06" + struct.pack("<HHHHLLH", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))
    return moved.getvalue()


def torch_members(content: bytes | object = GOOD, storages: Mapping[str, bytes] | None = None) -> list[Member]:
    """The members that torch.save writes for `content`; for the bytes of a data.pkl, with the storages given."""
    if isinstance(content, bytes):
        bodies = {"data.pkl": content, "byteorder": b"little"}
        bodies |= {f"data/{key}": body for key, body in (storages or {}).items()} | {"version": b"3\n"}
        return [Member(f"archive/{name}", body) for name, body in bodies.items()]
    with zipfile.ZipFile(io.BytesIO(torch_bytes(content))) as archive:
        return [Member(name, archive.read(name)) for name in archive.namelist()]


def changed(members: Iterable[Member], ending: str, **changes: Any) -> list[Member]:
    """Return the members with those fields changed in the one whose name ends so."""
    result = [replace(member, **changes) if member.name.endswith(ending) else member for member in members]
    assert result != list(members)
    return result


def flipped(body: bytes, position: int, bit: int = 0) -> bytes:
    return body[:position] + bytes([body[position] ^ 1 << bit]) + body[position + 1 :]


def deflated_zeros(mebibytes: int) -> bytes:
    """That many MiB of zeros as a raw deflate stream a thousandth as long, made without packing all of them."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return block * mebibytes + packer.flush(zlib.Z_FINISH)


def bomb(name: str, mebibytes: int = 2048) -> Member:
    """A member of 2 MB that unpacks to 2 GiB; a checksum of 0 says that none was computed."""
    return Member(name, deflated_zeros(mebibytes), method=8, size=mebibytes * 2**20, crc=0)


@dataclass(frozen=True, slots=True)
class Storage:
    """A reference to a storage of `count` elements under "data/<key>"."""

    key: str
    count: int
    type: Any = torch.FloatStorage


@dataclass(frozen=True, slots=True)
class View:
    """A tensor with any offset, shape and stride over a storage, whether they make sense or not."""

    storage: Storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.storage, self.offset, self.shape, self.stride, False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, thing: Any) -> Any:
        return ("storage", thing.type, thing.key, "cpu", thing.count) if isinstance(thing, Storage) else None


def torch_pickle(content: object) -> bytes:
    """A data.pkl that refers to storages."""
    buffer = io.BytesIO()
    _Pickler(buffer, 2).dump(content)
    return buffer.getvalue()


def tensor_file(views: Mapping[str, object], storages: Mapping[str, bytes]) -> bytes:
    return zip_bytes(torch_members(torch_pickle(dict(views)), storages))


def stored_good() -> tuple[dict[str, object], dict[str, bytes]]:
    """`GOOD` as views and storages, to add something to."""
    views: dict[str, object] = {}
    storages = {}
    for key, (name, tensor) in enumerate(GOOD.items()):
        views[name] = View(Storage(str(key), tensor.numel()), tuple(tensor.shape), tensor.stride())
        storages[str(key)] = tensor.numpy().tobytes()
    return views, storages


def with_extra(name: object, extra: object, storages: Mapping[str, bytes] | None = None) -> bytes:
    """A torch file of `GOOD` and one thing more."""
    views, own = stored_good()
    return zip_bytes(torch_members(torch_pickle(views | {name: extra}), own | dict(storages or {})))  # type: ignore[dict-item]


def good_and_raw(opcodes: bytes) -> bytes:
    """A torch file of `GOOD` whose dict also gets the key "x", with what these instructions make as its value."""
    views, storages = stored_good()
    body = torch_pickle(views)
    assert body.endswith(b"u.")
    return zip_bytes(torch_members(body[:-1] + unicode_opcode("x") + opcodes + b"s.", storages))


def raw_torch(opcodes: bytes) -> bytes:
    """A torch file with a data.pkl of these instructions, from which PROTO and STOP are left out."""
    return zip_bytes(torch_members(b"\x80\x02" + opcodes + b"."))


def number(value: int) -> bytes:
    encoded = pickle.encode_long(value)
    return b"\x8a" + bytes([len(encoded)]) + encoded  # LONG1


def with_shadows(names: Mapping[str, str], state: "OrderedDict[str, torch.Tensor]", on: str | None = None) -> bytes:
    """A torch file whose state dict, or whose tensor `on`, has attributes that hide methods.

    torch.save itself calls methods, so that the attributes get their names afterwards.

    Args:
        names: What is there in place of a method, by method: {"items": "collections Counter"}.
        state: What is in the file.
        on: The tensor that gets the attributes; None for the dict.
    """
    owner: Any = state if on is None else state[on]
    things = {"set": set, "Counter": importlib.import_module("collections").Counter, "OrderedDict": OrderedDict}
    for name, thing in names.items():
        setattr(owner, "~" + name[1:], things[thing])
    body = torch_members(state)
    data = next(node.body for node in body if node.name.endswith("data.pkl"))
    for name in names:
        assert unicode_opcode("~" + name[1:]) in data
        data = data.replace(unicode_opcode("~" + name[1:]), unicode_opcode(name))
    return zip_bytes(changed(body, "data.pkl", body=data))


def tar_bytes(canary: Path, start: bytes = b"") -> bytes:
    """torch's oldest format, a tar of pickles; `start` names an empty member in front, and so starts the file."""
    parts = {
        "storages": pickle.dumps(0, 2) + pickle.dumps([], 2),
        "tensors": pickle.dumps(0, 2),
        "pickle": pickle.dumps(Call(os.system, _touch(canary)), 2),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=tarfile.USTAR_FORMAT) as archive:
        if start:
            archive.addfile(tarfile.TarInfo("x"))
        for name, body in parts.items():
            header = tarfile.TarInfo(name)
            header.size = len(body)
            archive.addfile(header, io.BytesIO(body))
    body = bytearray(buffer.getvalue())
    if start:
        body[: len(start)] = start
        body[148:156] = b" " * 8  # the header's checksum counts its own field as spaces
        body[148:156] = b"%06o\0 " % sum(body[:512])
    return bytes(body)


class WritesWhenLoaded(nn.Module):
    """TorchScript may save files in `__setstate__`, which loading calls."""

    def __init__(self, canary: str) -> None:
        super().__init__()
        self.canary = canary
        self.training = False

    @torch.jit.export
    def __getstate__(self) -> str:
        return self.canary

    @torch.jit.export
    def __setstate__(self, state: str) -> None:
        self.training = False
        self.canary = state
        torch.save([torch.zeros(1)], state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def torchscript_bytes(canary: Path) -> bytes:
    """A TorchScript archive that writes the canary when it is loaded."""
    content = scripted_bytes(WritesWhenLoaded(str(canary)))
    canary.unlink(missing_ok=True)
    return content


def scripted_bytes(module: nn.Module) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), buffer)
    return buffer.getvalue()


def good_network() -> nn.Sequential:
    """`network` with the weights `GOOD`."""
    made = network().eval()
    made.load_state_dict(GOOD)
    return made


@functools.cache
def exported_members() -> tuple[tuple[str, bytes], ...]:
    """The members of a `good_network` exported with a dynamic shape."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = torch.export.Dim("batch", min=1, max=8)
        program = torch.export.export(good_network(), (torch.ones(2, 3, 8, 8),), dynamic_shapes=({0: batch},))
        torch.export.save(program, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return tuple((name, archive.read(name)) for name in archive.namelist())


def exported_bytes(change: Callable[[dict[str, bytes]], None]) -> bytes:
    """An exported program with its members changed."""
    members = dict(exported_members())
    change(members)
    return zip_bytes(Member(name, body) for name, body in members.items())


def _pickled_call(canary: Path) -> bytes:
    return torch_bytes(Call(os.system, _touch(canary)))


def _evil_inputs(members: dict[str, bytes], canary: Path) -> None:
    name = next(member for member in members if "sample_inputs" in member)
    members[name] = _pickled_call(canary)


def _change_json(members: dict[str, bytes], ending: str, change: Callable[[str], str]) -> None:
    name = next(member for member in members if member.endswith(ending))
    before = members[name].decode()
    members[name] = change(before).encode()
    assert members[name] != before.encode()


def _evil_weight(members: dict[str, bytes], canary: Path) -> None:
    _change_json(members, "weights_config.json", lambda text: text.replace('"use_pickle": false', '"use_pickle": true'))
    name = next(member for member in members if member.endswith("data/weights/weight_0"))
    members[name] = _pickled_call(canary)


def _evil_constant(members: dict[str, bytes], canary: Path) -> None:
    _change_json(members, "constants_config.json", lambda _: _opaque_config())
    root = next(iter(members)).partition("/")[0]
    members[f"{root}/data/constants/opaque_obj_0"] = pickle.dumps(Call(os.system, _touch(canary)), 2)


def _opaque_config() -> str:
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    return json.dumps({"config": {"evil": entry}})


def _evil_expression(members: dict[str, bytes], canary: Path) -> None:
    evil = f"__import__('os').system({_touch(canary)!r})"

    def change(text: str) -> str:
        document = json.loads(text)
        expressions = list(_expressions(document))
        assert expressions
        for expression in expressions:
            expression["expr_str"] = evil
        return json.dumps(document)

    _change_json(members, "models/model.json", change)


def _expressions(node: Any) -> Iterable[dict[str, Any]]:
    if isinstance(node, dict):
        if "expr_str" in node:
            yield node
        for value in node.values():
            yield from _expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from _expressions(value)


def _evil_library(members: dict[str, bytes], _canary: Path) -> None:
    root = next(iter(members)).partition("/")[0]
    members[f"{root}/data/aotinductor/model/model.so"] = b"\x7fELF\x02\x01\x01" + bytes(57)


EXPORTED: dict[str, Callable[[dict[str, bytes], Path], None]] = {
    "pickled sample inputs": _evil_inputs,
    "a weight that is a pickle": _evil_weight,
    "an opaque constant": _evil_constant,
    "a shape that is Python": _evil_expression,
    "a compiled library": _evil_library,
}


def index_bytes(weight_map: object) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()


def sharded(folder: Path, change: Callable[[dict[str, Any], Path], None], suffix: str = ".safetensors") -> Path:
    """Write `GOOD` in two shards with an index, changed before it is written; return the index."""
    names = list(GOOD)
    shards = [f"model-0000{n}-of-00002{suffix}" for n in (1, 2)]
    weight_map: dict[str, Any] = {}
    for shard, part in zip(shards, (names[:2], names[2:]), strict=True):
        state = {name: GOOD[name] for name in part}
        (folder / shard).write_bytes(safetensors_bytes(state) if suffix == ".safetensors" else torch_bytes(state))
        weight_map |= dict.fromkeys(part, shard)
    change(weight_map, folder)
    path = folder / f"model{suffix}.index.json"
    path.write_bytes(index_bytes(weight_map))
    return path
