"""Use of the rows of embeddings and codebooks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableRows:
    """How many rows of an embedding, or of a codebook, are looked up.

    Attributes:
        name: Name of the module, parameter or buffer: "quantizer.codebook".
        used_count: Rows that an index of `nn.Embedding`, `F.embedding`, `index_select` or `codebook[index]` selects.
    """

    name: str
    row_count: int
    used_count: int
