"""How many rows of embeddings and codebooks are used."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableRows:
    """How many rows of an embedding, or of a codebook, are looked up.

    Attributes:
        name: Of the module, or of the parameter or buffer: "quantizer.codebook".
        used_count: Rows that an index of `nn.Embedding`, `F.embedding`, `index_select` or `codebook[index]` selects.
    """

    name: str
    row_count: int
    used_count: int
