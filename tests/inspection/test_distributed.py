"""Parameters that are distributed over processes (FSDP2, tensor parallelism) have the numbers of the whole."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.commands.watch.conftest import ENVIRONMENT, TORCHRUN
from tests.fork_server import ForkServer

# Two of these run side by side. The script writes what hookscope finds, and whether the network still works after it.
SCRIPT = """
import json, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import hookscope
from tests.inspection.test_distributed import network, values

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=100))
mesh = init_device_mesh("cpu", (2,))

def distributed(kind):
    model = network(8 if kind == "tensor parallel" else 7)
    if kind == "tensor parallel":
        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel(use_local_output=False)}
        return parallelize_module(model, mesh, plan)
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)

def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

def loss(output):
    return whole(output).square().mean()

for kind in ("fully sharded", "tensor parallel"):
    model = distributed(kind)
    for _ in range(2):  # the second time shows what the first has left
        forward = hookscope.activations(model, values(), layer="*", save_tensors=True)
        run = hookscope.grads(model, values(), loss=loss, layer="*", save_tensors=True)
    assert forward.verification.status == run.verification.status == "same"
    assert all(parameter.grad is None for parameter in model.parameters())
    loss(model(values())).backward()
    after = {name: whole(parameter.grad).tolist() for name, parameter in model.named_parameters()}
    checked = hookscope.check(model)
    open(f"{kind} {dist.get_rank()}.json", "w").write(json.dumps({
        "loss": run.loss.value,
        "outputs": {row.label: [row.activation.shape, row.mean, row.l2] for row in forward.rows},
        "output gradients": {row.label: row.gradient.l2 for row in run.gradients},
        "parameters": {row.name: [row.gradient.l2, row.gradient.mean, row.weight_l2] for row in run.parameters},
        "tensors": {label: each.tolist() for label, each in run.tensors.items()},
        "after": after,
        "check": [checked.passed, [*checked.warnings]],
    }))
dist.destroy_process_group()
"""


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


def values() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder_of_both(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Path:
    folder = tmp_path_factory.mktemp("two")
    (folder / "two.py").write_text(SCRIPT, "utf-8")
    ended = fork_server.run(*TORCHRUN, 2, "two.py", cwd=folder, environment=ENVIRONMENT)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.parametrize("kind", ["fully sharded", "tensor parallel"])
@pytest.mark.exhaustive
def test_gradients_outputs_and_weights_are_those_of_the_network_in_one_piece(kind: str, folder_of_both: Path) -> None:
    model = network(8 if kind == "tensor parallel" else 7)
    outputs = [values()]
    for layer in model:
        outputs.append(layer(outputs[-1]))
        outputs[-1].retain_grad()
    loss = outputs[-1].square().mean()
    loss.backward()
    for rank in (0, 1):
        record = json.loads((folder_of_both / f"{kind} {rank}.json").read_bytes())
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            norms = (parameter.grad.norm().item(), parameter.grad.mean().item(), parameter.norm().item())
            assert record["parameters"][name] == pytest.approx(norms, rel=1e-5, abs=1e-8)
            torch.testing.assert_close(torch.tensor(record["tensors"][f"{name} grad"]), parameter.grad)
            torch.testing.assert_close(torch.tensor(record["after"][name]), parameter.grad)
        for index, output in enumerate(outputs[1:]):
            expected = [output.mean().item(), output.norm().item()]
            assert record["outputs"][str(index)][0] == [*output.shape]
            assert record["outputs"][str(index)][1:] == pytest.approx(expected, rel=1e-4, abs=1e-7)
            assert record["output gradients"][str(index)] == pytest.approx(output.grad.norm().item(), rel=1e-5)
        assert record["check"] == [True, []]
