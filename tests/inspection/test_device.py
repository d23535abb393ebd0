"""Which device an option means, on a machine without an accelerator and on one that claims to have one."""

import pytest
import torch

from hookscope.errors import UsageError
from hookscope.inspection.device import choose_device


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
