"""The colours of grids: the two colour maps drawn by default, and any other from matplotlib.

The default maps lie here as tables because importing matplotlib costs a tenth of a second, which a command that draws
a few grids should not pay. The tests hold them equal to matplotlib's.

viridis (for values that are never negative) is by Stéfan van der Walt and Nathaniel Smith, dedicated to the public
domain (CC0). berlin (for signed values) is by Fabio Crameri, from Scientific colour maps, under the MIT licence:

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

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hookscope.errors import UsageError, nearest

Colour = tuple[int, int, int]
Indices = NDArray[np.uint8]  # palette indices, (height, width)

# The palette: an odd number of colours, so that zero of a signed map is exactly the middle one; then what no value has.
LEVEL_COUNT = 241
NON_FINITE = 241
ALL_ZERO = 242
BACKGROUND = 243
TEXT = 255  # the entries from BACKGROUND to TEXT fade from one to the other, for smooth letters

_BACKGROUND_COLOUR = (255, 255, 255)
_TEXT_COLOUR = (24, 24, 24)
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

# 256 colours each, red, green and blue in two hexadecimal digits.
_TABLES = {
    "viridis": """
    44015444025544035745055845065a45085b46095c460b5e460c5f460e61470f6247116347126547146647156747166947186a48196b481a6c
    481c6e481d6f481e70482071482172482273482374472575472676472777472878472a79472b7a472c7b462d7c462f7c46307d46317e45327f
    45347f453580453681443781443982433a83433b83433c84423d84423e854240854141864142864043874044873f45873f47883e48883e4989
    3d4a893d4b893d4c893c4d8a3c4e8a3b508a3b518a3a528b3a538b39548b39558b38568b38578c37588c37598c365a8c365b8c355c8c355d8c
    345e8d345f8d33608d33618d32628d32638d31648d31658d31668d30678d30688d2f698d2f6a8d2e6b8e2e6c8e2e6d8e2d6e8e2d6f8e2c708e
    2c718e2c728e2b738e2b748e2a758e2a768e2a778e29788e29798e287a8e287a8e287b8e277c8e277d8e277e8e267f8e26808e26818e25828e
    25838d24848d24858d24868d23878d23888d23898d22898d228a8d228b8d218c8d218d8c218e8c208f8c20908c20918c1f928c1f938b1f948b
    1f958b1f968b1e978a1e988a1e998a1e998a1e9a891e9b891e9c891e9d881e9e881e9f881ea0871fa1871fa2861fa38620a48520a58521a685
    21a78422a78423a88323a98224aa8225ab8126ac8127ad8028ae7f29af7f2ab07e2bb17d2cb17d2eb27c2fb37b30b47a32b57a33b67935b778
    36b87738b97639b9763bba753dbb743ebc7340bd7242be7144be7045bf6f47c06e49c16d4bc26c4dc26b4fc36951c46853c56755c66657c665
    59c7645bc8625ec96160c96062ca5f64cb5d67cc5c69cc5b6bcd596dce5870ce5672cf5574d05477d05279d1517cd24f7ed24e81d34c83d34b
    86d44988d5478bd5468dd64490d64392d74195d73f97d83e9ad83c9dd93a9fd938a2da37a5da35a7db33aadb32addc30afdc2eb2dd2cb5dd2b
    b7dd29bade27bdde26bfdf24c2df22c5df21c7e01fcae01ecde01dcfe11cd2e11bd4e11ad7e219dae218dce218dfe318e1e318e4e318e7e419
    e9e419ece41aeee51bf1e51cf3e51ef6e61ff8e621fae622fde724
    """,
    "berlin": """
    9eaffe9caffd99affc97affb95aefa92aef990aef88eaef78badf689adf587adf484adf282acf17facf07dacef7babee78abed76aaeb73aaea
    71a9e96ea9e76ca8e669a8e467a7e364a6e162a6e05fa5de5da4dc5aa3da58a2d955a1d753a0d5519fd34e9ed14c9cce4a9bcc4899ca4698c8
    4496c54295c34093c03f91be3d90bb3c8eb93a8cb6398ab43789b13687af3585ac3483aa3381a7327fa5317da3307ca02f7a9e2e789b2e7699
    2d74962c72942b70912a6e8f2a6d8d296b8a28698827678527658326638125627e25607c245e7a235c77235a7522597321577020556e20536c
    1f51691e50671e4e651d4c631d4a601c495e1b475c1b455a1a4457194255194053183e51173d4f173b4c16394a163848153646153544143342
    14314013303e132e3c122d39122b37122a3511283311273111252f10242e10222c10212a101f28101e26101d24101c22101a2110191f10181d
    10171c10161a101519111417111316111215121113121012130f10140e0f150e0e160d0c170c0b180c0a190b081a0b071b0b061c0b051d0b04
    1e0b041f0b03200b02210b02220b02230c01240c01260c01270d00280d00290d002a0d002c0e002d0e002e0e002f0e00310e00320f00330f00
    350f00360f003810003910003a10003c11003d11003f11004012004212004313014513014614014814014915014b15024c16024e1602501703
    521803531904551905571a05591b065b1c075d1d085f1e0961200b63210c65220d67230e69250f6b26116e2812702914722b15742d17762e18
    79301a7b321c7d331e7f3520813721833923853b25883c278a3e298c402b8e422e904430924532944734964936984b389a4d3a9c4f3c9e513f
    a05241a25443a45645a55847a75a4aa95c4cab5e4ead6050af6153b16355b36557b56759b7695cb96b5ebb6d60bd6f63bf7165c27367c4756a
    c6776cc8786eca7a71cc7c73ce7e75d08078d2827ad4847cd6867fd88881da8a83dc8c86df8e88e1908be3928de5948fe79692e99894eb9a97
    ed9c99ef9e9cf2a19ef4a3a1f6a5a3f8a7a5faa9a8fcabaafeadad
    """,
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

    Args:
        name: A colour map of matplotlib; "viridis" and "berlin" do not import it.
        count: Levels; an odd number has one exactly in the middle.

    Raises:
        UsageError: If matplotlib knows no such map.
    """
    positions = np.linspace(0, 1, count)
    if name in _TABLES:
        table = np.frombuffer(bytes.fromhex(_TABLES[name]), np.uint8).reshape(256, 3)
        levels: NDArray[np.uint8] = table[np.minimum((positions * 256).astype(int), 255)]  # matplotlib's own rule
    else:
        import matplotlib as mpl  # noqa: PLC0415 - costs 0.1 s, and the default maps need none of it

        if name not in mpl.colormaps:
            known = [*mpl.colormaps]
            raise UsageError(
                f"No colour map is called {name[:80]!r}.{nearest(name[:80], known)} Give the name of a matplotlib"
                " colour map, or 'auto'."
            )
        levels = mpl.colormaps[name](positions, bytes=True)[:, :3].astype(np.uint8)
    levels.setflags(write=False)
    return levels


def distinct_colour(taken: NDArray[np.uint8], candidates: dict[str, Colour]) -> tuple[str, Colour]:
    """Return the name and value of the first candidate that none of the `taken` colours comes near.

    Args:
        taken: Colours in use, (count, 3).
        candidates: In order of preference. When every one is near to something, the farthest is returned.
    """
    near = 48  # Euclidean in 8-bit RGB, our choice: below this, two colours are easily mistaken in a small tile
    distances = {
        name: float(np.sqrt(((taken.astype(int) - colour) ** 2).sum(axis=1)).min())
        for name, colour in candidates.items()
    }
    chosen = next((name for name in candidates if distances[name] >= near), max(distances, key=distances.__getitem__))
    return chosen, candidates[chosen]


@lru_cache(maxsize=32)
def grid_palette(cmap: str) -> tuple[bytes, str, str]:
    """Return the 256 colours as bytes, and the names of those for non-finite values and all-zero channels."""
    levels = colour_levels(cmap, LEVEL_COUNT)
    shades = np.linspace(_BACKGROUND_COLOUR, _TEXT_COLOUR, TEXT - BACKGROUND + 1)
    shades = shades.round().astype(np.uint8)
    non_finite_name, non_finite = distinct_colour(np.vstack([levels, shades]), _NON_FINITE_COLOURS)
    all_zero_name, all_zero = distinct_colour(np.vstack([levels, shades[:1], [non_finite]]), _ALL_ZERO_COLOURS)
    colours = np.vstack([levels, [non_finite], [all_zero], shades]).astype(np.uint8)
    return colours.tobytes(), non_finite_name, all_zero_name
