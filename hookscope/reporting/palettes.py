"""The colours of grids and overlays: the colour maps drawn by default, and any other from matplotlib.

The default maps lie here as tables because importing matplotlib costs a tenth of a second, which a command that draws
a few grids should not pay. The tests hold them equal to matplotlib's.

viridis (for values that are never negative) and inferno (for overlays) are by Stéfan van der Walt and Nathaniel Smith,
dedicated to the public domain (CC0). coolwarm (for signed overlays) is by Kenneth Moreland, "Diverging Color Maps for
Scientific Visualization", 2009. berlin (for signed values) is by Fabio Crameri, from Scientific colour maps, under the
MIT licence:

    Copyright (c) 2020 Fabio Crameri

    Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
    documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
    rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to
    permit persons to whom the Software is furnished to do so, subject to the following conditions:

    The above copyright notice and this permission notice shall be included in all copies or substantial portions of
    the Software.

    THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO
    THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
    AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT,
    TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
    SOFTWARE.
"""

import base64
import zlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.errors import UsageError, nearest

Colour = tuple[int, int, int]
Indices = NDArray[np.uint8]  # palette indices, (height, width)

# The palette: an odd number of colours, so that zero of a signed map is exactly the middle one; then other colours.
LEVEL_COUNT = 241
NON_FINITE = 241
ALL_ZERO = 242
BACKGROUND = 243
TEXT = 255  # entries from BACKGROUND to TEXT are shades between them, for smooth letters

_BACKGROUND_COLOUR = (36, 40, 46)  # the same as in overviews
_TEXT_COLOUR = (236, 238, 241)
_NON_FINITE_COLOURS = {
    "magenta": (255, 0, 255),
    "lime": (0, 255, 0),
    "red": (255, 0, 0),
    "cyan": (0, 255, 255),
    "yellow": (255, 255, 0),
    "blue": (0, 0, 255),
    "white": (255, 255, 255),
}
_ALL_ZERO_COLOURS = {
    "grey": (120, 124, 130),
    "steel blue": (70, 120, 200),
    "olive": (128, 128, 0),
    "purple": (110, 60, 180),
    "teal": (0, 128, 128),
    "beige": (225, 215, 180),
    "brown": (120, 70, 20),
}

# 256 colours each, (256, 3) bytes: every colour less the one before it, deflated, in base 85.
_TABLES = {
    "viridis": (
        "c-noE(Gde72t*fXEhVJ?Qet2Q)SQ#t&CX+e`f>3kZ-_wDA5W<G52|32v!7ZD?WB<J*tq)<j2pw9XaqTObvBjLX#s0VacG&cai=_*KI&Kd?;Im8"
        "eZjc&IE3dGtg#q-zd&k~OqQ7A=r7IOAiwvhKWb=lF7+5MHs+}EImc-1!l4;bo?u>LOP6U@<`xQZ4x3o5hGqk|^a%uJ_!D5fXciy@zu;oL!EECC"
        "n&=l4(TE8"
    ),
    "inferno": (
        "c-n1}0S?132m@{C{{Q1LFkwlzNs)DSAVo<52M8EbX#!7RLfc|5oiME}_EeK*Zji+eO{ZBDhy`&n#i_kMtZ8Zj5^EIBKzrOgrSiXa>$gRmHEM}z"
        "j7QCERq?86+hy?`Zrh(|2yJ0ACRr_|Q+DX?735{{J}ZB7+T?cIBe`LRwfn<Jo)8^cfEA)oZkXM!2PdoqI;Q~rc)j`tjmP7!XRk%uTt9^mdpy7e"
        "J~h6Tm-vz$<)x(Il|U9#zyT}H-}rh1c&lrl"
    ),
    "coolwarm": (
        "c-n=GOBTZ*3<Cwn>KS_I-YdZ>{((ss%|dS^4|%;mZGL@zn$FF*FMbMfG_6&whrD+G4<6S9grl(>qzU^8w%Op<15}G^so1qZsVqAWz*@{fGW-cc"
        "(0Xu~i%;kdkYo3S29%#vfLHDln5l20P63%)(A-r8aUm+iUj@{Wa@1oKq2**<;<WcjA=6n`_Ze61rRMk#WbDP*>d;UgqT|S`?!t?5^O+aF-*8gw"
    ),
    "berlin": (
        "c-n1{i;YDg2t@hx-@>-A6$%f5QB1Be<8cOv@$cV^e36Hm1Hy3t+4T$DR<m98oD&+U!#P)5n=PH@w6kh*cN@B4(i_z)MudkP2L;{e1)(b=yRYu{"
        "jCwM({T_azbezEWvtS1oI5#(hawxq(J~j;?<_!X<Elihp1Q?O<O;dSrC>KlkT<M0qV#m51Dw-<NkxDLp4()T}u;<ca@+s@PK4k;+8K|E%1^VH)"
        "s(wU2i|S2i"
    ),
}

# matplotlib's diverging maps: their middle stands for zero whatever the values are.
_DIVERGING = (
    *("BrBG", "PRGn", "PiYG", "PuOr", "RdBu", "RdGy", "RdYlBu", "RdYlGn", "Spectral"),
    *("berlin", "bwr", "coolwarm", "managua", "seismic", "vanimo"),
)


def is_diverging(name: str) -> bool:
    """Tell whether the middle colour of the map `name` is made to stand for zero."""
    return name.removesuffix("_r") in _DIVERGING


@lru_cache(maxsize=32)
def colour_levels(name: str, count: int) -> NDArray[np.uint8]:
    """Return `count` colours at even steps of a colour map, (count, 3), red, green, blue.

    Maps outside `_TABLES` import matplotlib; a UsageError is raised if it has no such map.
    """
    positions = np.linspace(0, 1, count)
    if name in _TABLES:
        steps = np.frombuffer(zlib.decompress(base64.b85decode(_TABLES[name])), np.uint8).reshape(256, 3)
        table = np.cumsum(steps, axis=0, dtype=np.uint8)
        levels: NDArray[np.uint8] = table[np.minimum((positions * 256).astype(int), 255)]  # matplotlib's own rule
    else:
        import matplotlib as mpl  # noqa: PLC0415 - costs 0.1 s, and the default maps need none of it

        if name not in mpl.colormaps:
            names = [*mpl.colormaps]
            raise UsageError(
                f"No colour map is called {name[:80]!r}.{nearest(name[:80], names)} Give the name of a matplotlib"
                " colour map, or 'auto'."
            )
        levels = mpl.colormaps[name](positions, bytes=True)[:, :3].astype(np.uint8)
    levels.setflags(write=False)
    return levels


def distinct_colour(taken: NDArray[np.uint8], candidates: dict[str, Colour]) -> tuple[str, Colour]:
    """Return name and value of the first candidate that is far from all of `taken`, (count, 3); else the farthest."""
    near = 48  # Euclidean in 8-bit RGB: below this, two colours are easily mistaken in a small tile
    distances = {
        name: float(np.sqrt(((taken.astype(int) - colour) ** 2).sum(axis=1)).min())
        for name, colour in candidates.items()
    }
    chosen = next((name for name in candidates if distances[name] >= near), max(distances, key=distances.__getitem__))
    return chosen, candidates[chosen]


@lru_cache(maxsize=32)
def grid_palette(cmap: str) -> tuple[bytes, str, str]:
    """Return the 256 colours as bytes, and the names of the colours for non-finite values and all-zero channels."""
    levels = colour_levels(cmap, LEVEL_COUNT)
    shades = np.linspace(_BACKGROUND_COLOUR, _TEXT_COLOUR, TEXT - BACKGROUND + 1)
    shades = shades.round().astype(np.uint8)
    non_finite_name, non_finite = distinct_colour(np.vstack([levels, shades]), _NON_FINITE_COLOURS)
    all_zero_name, all_zero = distinct_colour(np.vstack([levels, shades[:1], [non_finite]]), _ALL_ZERO_COLOURS)
    colours = np.vstack([levels, [non_finite], [all_zero], shades]).astype(np.uint8)
    return colours.tobytes(), non_finite_name, all_zero_name


def palette_image(levels: Indices, cmap: str = "viridis") -> Image.Image:
    """Return palette indices as a picture, in the palette of a colour map."""
    image = Image.fromarray(levels)
    image.putpalette(grid_palette(cmap)[0])  # turns 8-bit grey into palette indices, values unchanged
    return image
