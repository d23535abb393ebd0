"""Import, and run resnet18 forward three times: the yardstick of `hookscope check`."""

import torch
from torchvision.models import resnet18

with torch.device("meta"):
    model = resnet18().eval()
model.to_empty(device="cpu")  # initialising weights is no part of it
state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
model.load_state_dict(state)
batch = torch.zeros(1, 3, 224, 224)
with torch.no_grad():
    for _ in range(3):
        model(batch)
