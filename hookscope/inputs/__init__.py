"""Turn files into network inputs: formats, colour modes, preprocessing, batches, and refusing hostile files.

Choices a reader should know, all recorded in `InputRecord.steps`:

- Preprocessing follows torchvision's presets bit for bit: pictures are resized with Pillow (antialiased), clips without
  antialiasing, because torchvision's video presets were trained that way. torchvision itself is not imported.
- An alpha channel is dropped, not composited, and a colour profile is not applied: that is what torchvision's and
  timm's data loaders do, so it is what networks saw in training.
- 16-bit and floating-point greyscale stays in floating point; it is never squeezed into 8 bits or saturated. Pillow
  reads only the high byte of 16-bit colour.
- The first frame of an animation or a multi-page file counts.
- AVIF and HEIC with more than 8 bits a channel are read in 8. JPEG 2000 is read in 8 bits, its greyscale also in 9 to
  16; deeper colour is refused, because Pillow decodes it wrongly.
- A PNG with a wrong checksum, and a picture that is cut off, are errors even where Pillow has been told to be lenient.
- A tensor file is passed as it is; nothing but its dtype and a batch axis is touched.
"""
