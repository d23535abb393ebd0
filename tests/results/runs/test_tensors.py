"""Saved tensors: the file of safetensors' own writer byte for byte, and memory that does not grow with the inputs."""

import copy
import gc
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hookscope
from hookscope.errors import OutputError
from hookscope.inspection.saved_tensors import TensorCollector
from hookscope.results.runs.tensors import DTYPES, write_tensors
from tests.networks import Apply


def every_kind() -> dict[str, Tensor]:
    """One tensor of each dtype and of odd shapes, under odd names."""
    made = {f"of {name}": torch.arange(6).view(2, 3).to(getattr(torch, name)) for name in DTYPES}
    names = ["net.0#1['out']", "Größe 大小 🎉", 'quote " and \\', "line\nfeed\t\x1f\x7f", "", "(model):add"]
    return (
        made | {name: torch.randn(3, 2) for name in names} | {"empty": torch.empty(0, 4), "number": torch.tensor(2.5)}
    )


def collected(tensors: dict[str, Tensor]) -> Any:
    collector = TensorCollector(1, None)
    for name, tensor in tensors.items():
        collector.collect(name, tensor)
    collector.end()
    return collector.joined({*tensors})


def test_the_file_is_that_of_safetensors_byte_for_byte(tmp_path: Path) -> None:
    tensors = every_kind()
    saved = collected(tensors)
    write_tensors(tmp_path / "ours", saved.spooled, saved.spool)
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert list(saved) == list(tensors)


@pytest.mark.parametrize("limit", [0, 2**26], ids=["in a file", "in memory"])
def test_what_is_read_back_is_what_was_given(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr("hookscope.results.runs.tensors._MOST_IN_MEMORY", limit)
    tensors = every_kind()
    saved = collected(tensors)
    for case in (saved, pickle.loads(pickle.dumps(saved)), copy.deepcopy(saved)):
        assert case.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (case[name].dtype, case[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(case[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_batches_are_joined_and_those_that_fail_leave_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, failed, second, other = torch.randn(2, 3), torch.randn(9, 3), torch.randn(1, 3), torch.randn(1, 4)
    collector = TensorCollector(3, None)
    for finished, (whole, varying) in [(2, (first, first)), (2, (failed, failed)), (3, (second, other))]:
        collector.collect("whole", whole)
        collector.collect("varying", varying)
        collector.collect("time first", torch.stack([whole, -whole, 2 * whole]))  # (T, N, D)
        collector.collect("not shown", whole)
        collector.end_batch(finished)
    saved = collector.joined({"whole", "varying", "time first"})
    together = torch.cat([first, second])
    expected = {"whole": together, "varying@0": first, "varying@1": other}
    expected["time first"] = torch.stack([together, -together, 2 * together])
    assert list(saved) == list(expected)
    write_tensors(tmp_path / "tensors", saved.spooled, saved.spool)
    for name, tensor in load_file(tmp_path / "tensors").items():
        assert torch.equal(tensor, expected[name])
        assert torch.equal(saved[name], expected[name])


def odd_outputs(values: Tensor) -> dict[str, Tensor]:
    return {
        "meta": values.to("meta"),
        "CSR": values.to_sparse_csr(),
        "COO": values.to_sparse(),
        "BSC": torch.eye(4).to_sparse_bsc((2, 2)),
        "nested": torch.nested.nested_tensor([values, values[:1]]),
        "jagged": torch.nested.nested_tensor([values, values[:1]], layout=torch.jagged),
        "complex128": values.to(torch.complex128),
        "quantised": torch.quantize_per_tensor(values, 0.5, 0, torch.qint8),
        "conjugate": torch.complex(values, values + 1).conj(),
        "negative": torch.complex(values, values + 1).conj().imag,
        "plain": values,
    }


class OddOutputs(nn.Module):
    def forward(self, values: Tensor) -> dict[str, Tensor]:
        return odd_outputs(values)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:torch.quantize_per")
def test_outputs_that_a_file_cannot_hold_are_left_out(tmp_path: Path) -> None:
    values = torch.tensor([[1.0, 0.0], [-2.0, 3.0]])
    run = hookscope.activations(OddOutputs(), values, layer="*", save_tensors=True)
    run.save(tmp_path / "run")
    expected = odd_outputs(values)
    stored = load_file(tmp_path / "run" / "activations.safetensors")
    assert stored.keys() == {f"(model)['{name}']" for name in ("quantised", "conjugate", "negative", "plain")}
    assert torch.equal(stored["(model)['quantised']"], expected["quantised"].dequantize())
    assert torch.equal(stored["(model)['conjugate']"], expected["conjugate"].resolve_conj())
    assert torch.equal(stored["(model)['negative']"], -(values + 1))
    assert run["(model)['meta']"].activation.unmeasured


def test_an_output_that_loses_an_axis_in_the_last_batch_is_kept_by_batch() -> None:
    network, values = nn.Sequential(Apply(torch.squeeze), nn.Identity()), torch.arange(3.0)[:, None]
    saved = hookscope.activations(network, values, save_tensors=True, batch_size=2).tensors
    assert {label: tensor.tolist() for label, tensor in saved.items()} == {"0@0": [0, 1], "0@1": 2}


def test_no_room_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("hookscope.results.runs.tensors.TensorSpool.append", full)
    with pytest.raises(OutputError, match=r"cannot be kept in .*: .*Free some space, or set TMPDIR"):
        hookscope.activations(nn.Linear(3, 3), torch.ones(2, 3), save_tensors=True)


MEASURED = """
import resource, sys
from pathlib import Path
import torch
from torch import nn
import hookscope
from hookscope.inputs.batches import Batch
from hookscope.inspection.forward import ForwardOptions, inspect
from hookscope.inspection.saved_tensors import TensorCollector

network = nn.Sequential(nn.Identity())
record = hookscope.activations(network, torch.ones(1, 2)).inputs[0]
collector = TensorCollector(1, None)

def batches():
    for number in range(int(sys.argv[1])):
        yield Batch((torch.full((1, 2**21), float(number)),), (number,), (record,))  # 8 MiB each

run = inspect(
    network, batches(), ForwardOptions(layers=["0"]), on_tensor=collector.collect, on_batch=collector.end_batch,
)
saved = collector.joined({"0"})
from hookscope.results.runs.tensors import write_tensors
write_tensors(Path(sys.argv[2]), saved.spooled, saved.spool)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in kilobytes on Linux")
def test_memory_does_not_grow_with_the_inputs(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        command = [sys.executable, "-c", MEASURED, str(count), str(tmp_path / "tensors")]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) * 1024

    gc.collect()
    few, many = peak(12), peak(60)
    assert many - few < 48 * 8 * 2**20 / 4  # 384 MiB more were written
