"""Mean and variance of each channel of a tensor."""

import torch
from torch import Tensor


def channel_moments(values: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return mean and population variance of each channel, (C,), of floating values that are not empty.

    Below float32 they are computed in float32.
    """
    values = values if values.dtype == torch.float64 else values.float()
    if values.is_cpu and axis == 1:  # more than twice as fast as var_mean
        mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
        return mean, variance
    others = [each for each in range(values.dim()) if each != axis]
    if not others:
        return values, torch.zeros_like(values)
    variance, mean = torch.var_mean(values, others, correction=0)
    return mean, variance
