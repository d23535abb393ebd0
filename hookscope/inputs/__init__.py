"""Turn files into network inputs: formats, colour modes, preprocessing, batches, and refusing hostile files.

Choices a reader should know, all recorded in `InputRecord.steps`:

- Preprocessing follows torchvision's presets bit for bit: pictures are resized with Pillow (antialiased), clips without
  antialiasing, because torchvision's video presets were trained that way. torchvision itself is not imported.
- An alpha channel is dropped, not composited, and a colour profile is not applied: that is what torchvision's and
  timm's data loaders do, so it is what networks saw in training.
- 16-bit and floating-point greyscale stays in floating point; it is never squeezed into 8 bits or saturated. Of 16-bit
  colour Pillow reads the high byte only.
- Of an animation or a multi-page file the first frame counts.
- Of AVIF and HEIC with more than 8 bits a channel 8 are read. JPEG 2000 is read in 8 bits, and greyscale in 9 to 16;
  deeper colour is refused, because Pillow decodes it wrongly.
- A PNG with a wrong checksum, and a picture that is cut off, are errors even where Pillow has been told to be lenient.
- A tensor file is passed as it is; nothing but its dtype and a batch axis is touched.
"""

from hookscope.inputs.batches import (
    Batch,
    copy_of,
    count_inputs,
    in_batches,
    load_batches,
    noise_batch,
    part_of,
    to_device,
)
from hookscope.inputs.finding import TENSOR_SUFFIXES, find_inputs
from hookscope.inputs.labelled_files import LabelledFiles, find_labelled
from hookscope.inputs.loading import load_input, read_tensor
from hookscope.inputs.named import NamedInput, named_batch, read_named, with_named, without_named_frame
from hookscope.inputs.preprocessing_options import assumed_preparation, parse_shape, preprocessing_from_options

__all__ = [
    "TENSOR_SUFFIXES",
    "Batch",
    "LabelledFiles",
    "NamedInput",
    "assumed_preparation",
    "copy_of",
    "count_inputs",
    "find_inputs",
    "find_labelled",
    "in_batches",
    "load_batches",
    "load_input",
    "named_batch",
    "noise_batch",
    "parse_shape",
    "part_of",
    "preprocessing_from_options",
    "read_named",
    "read_tensor",
    "to_device",
    "with_named",
    "without_named_frame",
]
