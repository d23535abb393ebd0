"""Which device an option means, on a machine without an accelerator and on one that claims to have one."""

import pytest
import torch
from torch import nn

import hookscope
from hookscope.errors import UsageError
from hookscope.inspection.device import choose_device, placement


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda:1", "--device 'cuda:1' is not available: torch sees 1 CUDA device here. Give cpu, or auto."),
        ("cuda:256", "--device 'cuda:256' is not a device."),  # torch reads it as cuda:0
        ("cuda:128", "--device 'cuda:128' is not a device."),  # and this as cuda:-128
        ("gpu", "--device 'gpu' is not a device. Give auto, cpu, cuda, cuda:1 or mps."),
        ("meta", "--device 'meta' is not available here. Give cpu, or auto."),
    ],
)
def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("cuda") == choose_device("auto") == torch.device("cuda:0")
    with pytest.raises(UsageError) as raised:
        choose_device(name)
    assert str(raised.value).startswith(message)


class Fixed(nn.Module):
    """A linear layer whose weight is a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> None:
        super().__init__()
        self.register_buffer("indices", torch.arange(2, device=device))
        self.register_buffer("weight", torch.ones(3, 4, dtype=dtype, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def test_a_network_without_parameters_is_where_its_buffers_are() -> None:
    assert placement(Fixed(torch.float16, "meta")) == (torch.device("meta"), torch.float16)
    assert placement(nn.ReLU()) == (torch.device("cpu"), torch.float32)
    run = hookscope.activations(Fixed(), input_shape="2,4")  # torch multiplies no float32 by float64
    assert (run.device, run.dtype) == ("cpu", "float64")
