"""Tell with which precision networks compute."""

from collections.abc import Sequence

import torch

from hookscope.differences.party import Party


def coarsest_eps(parties: Sequence[Party]) -> float:
    """Return the machine epsilon of the coarsest dtype that A and B compute in."""
    return max(_epsilons(party)[0] for party in parties[:2])


def precision_notes(parties: Sequence[Party]) -> list[str]:
    """Return notes about networks that multiply in TF32."""
    return [
        f"{party.title} multiplies in TF32, with 10 bits of mantissa, as torch does on CUDA unless told not to."
        for party in parties[:2]
        if _epsilons(party)[1] == "TF32"
    ]


def _epsilons(party: Party) -> tuple[float, str]:
    device, dtype = party.inspected.placed
    kinds = [getattr(torch, dtype)] if dtype != "none" else [torch.float32]
    kinds += [party.autocast] if party.autocast else []
    known = [(torch.finfo(kind).eps, str(kind).removeprefix("torch.")) for kind in kinds]
    if device.startswith("cuda") and torch.float32 in kinds and torch.backends.cudnn.allow_tf32:
        known.append((2.0**-10, "TF32"))  # its mantissa has 10 bits
    return max(known)
