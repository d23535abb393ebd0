"""What a user's own script would do: import, build, read a picture, run once. The yardstick of the whole command."""

import sys

import torch
from PIL import Image
from torchvision.models import ResNet34_Weights, resnet34

torch.manual_seed(0)
model = resnet34().eval()
with Image.open(sys.argv[1]) as picture:
    batch = ResNet34_Weights.IMAGENET1K_V1.transforms()(picture.convert("RGB")).unsqueeze(0)
with torch.no_grad():
    output = model(batch)
print(output.max().item())
