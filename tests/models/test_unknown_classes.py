"""What is read past unknown classes, against what the libraries themselves load."""

import argparse
import functools
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

from hookscope.checkpoints.checkpoint import FileOptions
from hookscope.checkpoints.fileformat import file_kind
from hookscope.checkpoints.global_names import is_forbidden, refused_names
from hookscope.checkpoints.stand_ins import ModuleState
from hookscope.checkpoints.unknown_classes import read_past_unknown
from hookscope.checkpoints.unpickler import InertUnpickler, StandIn, UnreadablePickleError
from hookscope.errors import CheckpointError, UntrustedFileError
from hookscope.models.checkpoint import read_checkpoint
from hookscope.models.contents import list_contents
from tests.models import hostile
from tests.models.hostile import Storage, View


def read(path: Path) -> Any:
    return read_past_unknown(path, file_kind(path))


def loaded_by_torch(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, weights_only=False)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mobilenet": lambda: torchvision.models.mobilenet_v3_small(num_classes=3),
    "vit": lambda: torchvision.models.VisionTransformer(32, 16, 1, 2, 8, 16, num_classes=3),
    "tied": lambda: nn.Sequential(_tied()),
    "weight norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2)), nn.LSTM(2, 3)),
    "wrapped": lambda: nn.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    "half": lambda: nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2)).half().to(memory_format=torch.channels_last),
}


def _tied() -> nn.Module:
    network = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    network[1].weight = network[0].weight
    network.register_buffer("kept", torch.ones(1))
    network.register_buffer("not_kept", torch.ones(1), persistent=False)
    return network


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Couldn't retrieve source code")
@pytest.mark.parametrize("in_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_pickled_module_reads_as_its_own_state_dict(tmp_path: Path, name: str, in_zip: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        network = NETWORKS[name]()
    torch.save(network, tmp_path / "net.pt", _use_new_zipfile_serialization=in_zip)
    expected, actual = network.state_dict(), read(tmp_path / "net.pt")
    assert type(actual) is ModuleState
    assert actual.class_name == f"{type(network).__module__}.{type(network).__qualname__}"
    assert list(actual) == list(expected)
    for key, tensor in expected.items():
        assert (actual[key].dtype, actual[key].stride()) == (tensor.dtype, tensor.stride()), key
        assert torch.equal(actual[key], tensor), key


@pytest.mark.parametrize("in_zip", [True, False], ids=["zip", "legacy"])
def test_views_that_negate_or_conjugate_their_memory_read_as_their_values(tmp_path: Path, in_zip: bool) -> None:
    values = torch.randn(3, 4, dtype=torch.complex64)
    state = {"conjugate": values.conj(), "negative": torch.randn(2, 2, dtype=torch.complex64).conj().imag.clone()}
    state["negative"] = torch._neg_view(state["negative"])
    path = tmp_path / "net.pt"
    torch.save({"state": state, "settings": argparse.Namespace()}, path, _use_new_zipfile_serialization=in_zip)
    actual = read(path)["state"]
    assert torch.equal(torch.view_as_real(actual["conjugate"].resolve_conj())[..., 1], -values.imag)
    assert torch.equal(actual["negative"], state["negative"])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:torch.ao.quantization is deprecated")
def test_packed_weights_of_a_pickled_int8_network_are_said_to_be_skipped(tmp_path: Path) -> None:
    network = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)), {nn.Linear})
    torch.save(network, tmp_path / "net.pt")
    listed = list_contents(tmp_path / "net.pt")
    assert [tensor.key for part in listed.parts for tensor in part.tensors] == ["0.weight", "0.bias"]
    assert listed.warnings == ("net.pt: skipped: 1 object of torch.ScriptObject; 2 tensors inside it.",)


ARRAYS: dict[str, Any] = {
    **{
        dtype: np.arange(6).reshape(2, 3).astype(dtype)
        for dtype in ("f2", "f4", "f8", "i1", "i8", "u1", "u2", "?", "c8")
    },
    "other byte order": np.arange(4.0).astype(">f4"),
    "columns first": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "no axes": np.array(1.5),
    "no elements": np.zeros((0, 3)),
}
SCALARS = {"float64": np.float64(0.1), "float32": np.float32(0.5), "int64": np.int64(2**40), "bool": np.bool_(True)}


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_numpy_are_tensors_of_the_same_numbers(tmp_path: Path, name: str, protocol: int) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"w": ARRAYS[name], "again": ARRAYS[name]}, protocol))
    actual = read(tmp_path / "a.pkl")
    assert isinstance(actual["w"], Tensor)
    assert actual["w"].shape == ARRAYS[name].shape
    assert actual["w"].numpy().dtype == ARRAYS[name].dtype.newbyteorder("=")
    assert np.array_equal(actual["w"].numpy(), ARRAYS[name])
    assert actual["again"] is actual["w"]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", SCALARS)
def test_numbers_of_numpy_are_numbers(tmp_path: Path, name: str, protocol: int) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([SCALARS[name]], protocol))
    [actual] = read(tmp_path / "a.pkl")
    assert (type(actual), actual) == (type(SCALARS[name].item()), SCALARS[name].item())


@pytest.mark.parametrize("protocol", [2, 4])
def test_tensors_read_as_torch_loads_them(tmp_path: Path, protocol: int) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    parameter = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    held = {
        "views": [whole, whole[1:], whole.t(), whole[:, ::2], whole[0, 0]],
        "dtypes": [torch.ones(3).to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.complex64, torch.bool)],
        "young": [torch.ones(3).to(dtype) for dtype in (torch.float8_e4m3fn, torch.uint16)],
        "parameters": (parameter, nn.Parameter(torch.ones(1))),
        "empty": torch.empty(0, 3),
        "args": argparse.Namespace(),
    }
    torch.save(held, tmp_path / "t.pt", pickle_protocol=protocol)
    actual, expected = read(tmp_path / "t.pt"), loaded_by_torch(tmp_path / "t.pt")
    for key in ("views", "dtypes", "young", "parameters"):
        for mine, theirs in zip(actual[key], expected[key], strict=True):
            assert (type(mine), mine.dtype, mine.stride()) == (type(theirs), theirs.dtype, theirs.stride())
            assert mine.requires_grad == theirs.requires_grad
            assert torch.equal(
                mine.view(torch.uint8) if key == "young" else mine,
                theirs.view(torch.uint8) if key == "young" else theirs,
            )
    assert actual["views"][1].untyped_storage().data_ptr() == actual["views"][0].untyped_storage().data_ptr()
    assert actual["empty"].shape == (0, 3)


def with_namespace(view: View, storages: dict[str, bytes]) -> bytes:
    return hostile.zip_bytes(
        hostile.torch_members(hostile.torch_pickle({"w": view, "x": argparse.Namespace()}), storages)
    )


BAD_VIEWS = {
    "beyond its storage": View(Storage("b", 4), (5,), (1,)),
    "with a negative size": View(Storage("b", 4), (-1,), (1,)),
    "with a negative stride": View(Storage("b", 4), (2,), (-1,), 3),
    "with too few strides": View(Storage("b", 4), (2, 2), (1,)),
    "of a storage of another size": View(Storage("b", 3), (3,), (1,)),
    "of a storage that is not there": View(Storage("c", 4), (4,), (1,)),
    "of 2^62 elements": View(Storage("b", 4), (2**62,), (0,)),
}


@pytest.mark.parametrize("name", BAD_VIEWS)
@pytest.mark.sample("beyond its storage", "with a negative stride", "of 2^62 elements")
def test_a_tensor_that_claims_more_than_it_has_is_refused_beside_a_namespace_too(tmp_path: Path, name: str) -> None:
    path = tmp_path / "t.pt"
    path.write_bytes(with_namespace(View(Storage("b", 4), (4,), (1,)), {"b": bytes(16)}))
    assert read_checkpoint(path).state["w"].shape == (4,)
    path.write_bytes(with_namespace(BAD_VIEWS[name], {"b": bytes(16)}))
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cargparse\nNamespace\n)\x81}b}b",  # a second state
        b"ctorch._utils\n_rebuild_tensor_v2\n}b",  # a state for a name
        b"]}b",
        b"cargparse\nNamespace\nK\x01K\x02s",
        b"}]K\x01s",  # a list as a key
        b"K\x05)R",  # a call of a number
        b"cargparse\nNamespace\n]R",  # arguments that are no tuple
        b"\x82\x01",  # EXT1
        b"\x97",  # NEXT_BUFFER
        b"(K\x01K\x02K\x03d",  # a key without a value
        b"0",
        b"R",
    ],
)
def test_what_no_pickler_writes_is_an_error(opcodes: bytes) -> None:
    with pytest.raises(UnreadablePickleError):
        InertUnpickler(io.BytesIO(b"\x80\x02" + opcodes + b".")).load()


def test_a_stand_in_has_nothing_that_a_file_could_name() -> None:
    namespace = argparse.Namespace()
    vars(namespace).update({"__setstate__": 1, "__dict__": 2})
    made = InertUnpickler(io.BytesIO(pickle.dumps(namespace, 2))).load()
    assert type(made) is StandIn
    assert not hasattr(made, "__dict__")
    assert not hasattr(made, "__setstate__")
    assert made.state == {"__setstate__": 1, "__dict__": 2}


@pytest.mark.parametrize(
    "name",
    [
        *("posix.system", "subprocess.Popen", "builtins.exec", "importlib.import_module", "operator.attrgetter"),
        *("functools.partial", "torch.load", "torch.hub.load", "numpy.load", "pickle.loads", "shutil.rmtree"),
        "torch.storage._load_from_bytes",
        *("vendornet.os.system", "vendornet.Net.__init__", "argparse._sys.modules", "pathlib.os.system"),
        *("torch.hub.a\nb", "os\n.system", "__x\n__.y", ".os.system", "os."),
        *("__main__.os.system", "__main__.__builtins__", "__mp_main__.exec", "__main__", "x.__main__.y"),
        *("torch.nn.modules.module.os.system", "collections.abc.sys.exit", "types.FunctionType", "types.CodeType"),
    ],
)
def test_names_that_can_run_anything_cannot_be_allowed(name: str) -> None:
    assert is_forbidden(name)
    assert refused_names([name], ["*"]) == refused_names([name], None) == [name]


def test_other_names_pass_a_gate_that_allows_them_and_no_gate() -> None:
    assert refused_names(["vendornet.Net", "other.Net"], ["vendornet.*"]) == ["other.Net"]
    assert refused_names(["vendornet.Net", "__main__.Config", "__mp_main__.Config.Inner"], None) == []
    assert refused_names(["vendornet.Net"], ["Net", "vendornet"]) == ["vendornet.Net"]
    assert refused_names(["argparse.Namespace.__init__"], ["argparse.*"]) == ["argparse.Namespace.__init__"]


def test_modules_in_modules_without_end_are_refused(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(1, 1))
    network._modules["1"] = network
    torch.save(network, tmp_path / "net.pt")
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "net.pt")
    deep = functools.reduce(lambda inner, _: nn.Sequential(inner, inner), range(18), nn.Linear(1, 1))  # 2^18 names
    torch.save(deep, tmp_path / "net.pt")
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "net.pt")


@pytest.mark.parametrize("depth", [1000, 100_000])
@pytest.mark.sample("1000")
def test_objects_in_objects_without_end_end_in_one_sentence_or_are_skipped(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "deep.pkl"
    deep = b"\x80\x02cargparse\nNamespace\nq\x000" + b"(h\x00" * depth + b"N" + b"o" * depth + b"."
    path.write_bytes(deep)
    with pytest.raises(CheckpointError, match="Namespace"):
        read_checkpoint(path)


class Wrapper(Tensor):
    """A tensor that has another one, as a DTensor has: torch saves its class and its attributes."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_tensor_that_wraps_another_is_not_called_damaged(tmp_path: Path, as_zip: bool) -> None:
    content = {"weight": Wrapper(torch.ones(2))}
    torch.save(content, tmp_path / "model.pt", _use_new_zipfile_serialization=as_zip)
    for read in (read_checkpoint, list_contents):
        with pytest.raises(
            CheckpointError, match=r"holds tensors of tests\.\S+\.Wrapper, unreadable without that class"
        ):
            read(tmp_path / "model.pt")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_of_several_parts_is_skipped_and_the_others_are_read(tmp_path: Path) -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    torch.save({"ragged": ragged, "weight": torch.ones(2)}, tmp_path / "model.pt")
    checkpoint = read_checkpoint(tmp_path / "model.pt")
    assert torch.equal(checkpoint.state["weight"], torch.ones(2))
    skipped = "skipped: 1 object of torch.nested._internal.nested_tensor.NestedTensor; 1 tensor inside it."
    assert checkpoint.warnings[0].endswith(skipped)


@pytest.mark.parametrize("protocol", [1, 3])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_instructions_that_torch_lacks_are_read_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    content = {"state_dict": {"weight": torch.ones(2)}, "note": b"\xff" * 300, "step": 10**700}
    torch.save(content, tmp_path / "model.pt", pickle_protocol=protocol)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "model.pt", weights_only=True)
    checkpoint = read_checkpoint(tmp_path / "model.pt")
    assert torch.equal(checkpoint.state["weight"], torch.ones(2))
    assert "has pickle instructions that torch lacks; nothing was imported." in checkpoint.warnings[0]


@pytest.mark.parametrize("protocol", [2, 4])
def test_tensors_that_pickle_wrote_are_code_to_run_and_not_damaged(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps({"w": torch.ones(2)}, protocol))  # which keeps the bytes of a torch.save inside
    with pytest.raises(UntrustedFileError, match=r"would import torch\.storage\._load_from_bytes, which can run code"):
        read_checkpoint(path)
    assert read_checkpoint(path, FileOptions(trust=True)).state["w"].tolist() == [1, 1]


@pytest.mark.timeout(60)
def test_what_skipped_objects_share_is_counted_once(tmp_path: Path) -> None:
    # Going through the shared list for each of the objects would take 2^32 steps.
    shared = [torch.ones(2), *range(2**16)]
    objects = [argparse.Namespace(values=shared) for _ in range(2**16)]
    torch.save({"state_dict": {"w": torch.ones(2)}, "args": objects}, tmp_path / "a.pt")
    said = "skipped: 65,536 objects of argparse.Namespace; 1 tensor inside them."
    assert read_checkpoint(tmp_path / "a.pt").warnings[0].endswith(said)


def test_a_number_that_python_does_not_print_is_refused(tmp_path: Path) -> None:
    for number, refused in ((10**4000, False), (10**5000, True)):
        torch.save({"w": torch.ones(2), "n": number}, tmp_path / "n.pt", pickle_protocol=4)
        if refused:
            with pytest.raises(CheckpointError):
                list_contents(tmp_path / "n.pt")
        else:
            assert len(list_contents(tmp_path / "n.pt").tensors) == 1
