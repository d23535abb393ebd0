"""List a checkpoint and print the seconds it took and the megabytes by which memory peaked above the imports'."""

import resource
import sys
import time
from pathlib import Path

import timm  # noqa: F401 - what the listing compares names with, imported beforehand
import torchvision  # noqa: F401 - likewise

from hookscope.models.listing import list_contents

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
list_contents(Path(sys.argv[1]))
seconds = time.perf_counter() - began
print(seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3)
