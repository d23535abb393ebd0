"""Measure a section in a process of its own: `python -m benchmarks.children.section DEVICE SECTION FILE` pickles it."""

import pickle
import sys
from pathlib import Path

import torch

from benchmarks.sections import SECTIONS, THREADS

device, name, path = sys.argv[1:]
torch.set_num_threads(THREADS)
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
Path(path).write_bytes(pickle.dumps(SECTIONS[device][name]()))
