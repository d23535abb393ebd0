"""Class activation maps: one map from what a layer returned and the gradient of a score with respect to it.

Each function takes the activation A and the gradient g = dy/dA of the score y, both (N, C, h, w), and returns maps,
(N, h, w), not scaled; k counts channels. Signals, (N, C, l), and volumes, (N, C, d, h, w), have the same formulas with
sums over their positions.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

# A map of sums with a smaller part of its shares' magnitude is rounding. Before LayerNorms rounding left 4e-9 to 2e-6
# in float32, and 7e-4 in bfloat16; maps of other layers had 0.01 to 0.3.
_CANCELLED = 2.0**-9


def grad_cam(activation: Tensor, gradient: Tensor) -> Tensor:
    """Weigh each channel by the mean of its gradient, and keep what speaks for the score.

    M = ReLU(sum_k a_k A_k), a_k = mean over positions of g_k.

    Source:
        Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization, ICCV 2017,
        equations 1 and 2.
    """
    return (gradient.mean(_places(gradient), keepdim=True) * activation).sum(1).clamp(min=0)


def grad_cam_plus_plus(activation: Tensor, gradient: Tensor) -> Tensor:
    """Weigh the positions of a channel so that each of several objects counts, however small it is.

    M = ReLU(sum_k w_k A_k), w_k = sum over positions of a ReLU(g), and at each position
    a = g^2 / (2 g^2 + g^3 sum over positions of A_k), or 0 where g is 0.

    The paper differentiates exp(y), so that higher derivatives are powers of g; the factor exp(y), which is one number
    for the whole map, is left out.

    Source:
        Chattopadhay et al., Grad-CAM++: Generalized Gradient-based Visual Explanations for Deep Convolutional Networks,
        WACV 2018, equations 10 and 19.
    """
    # Divided by g^2, so that small gradients keep their digits.
    divisor = 2 + gradient * activation.sum(_places(activation), keepdim=True)
    share = divisor.reciprocal().where((divisor != 0) & (gradient != 0), 0)
    weight = (share * gradient.clamp(min=0)).sum(_places(gradient), keepdim=True)
    return (weight * activation).sum(1).clamp(min=0)


def layer_cam(activation: Tensor, gradient: Tensor) -> Tensor:
    """Weigh each position of each channel by its own gradient where that is positive: fit for early layers too.

    M = ReLU(sum_k ReLU(g_k) A_k).

    Source:
        Jiang et al., LayerCAM: Exploring Hierarchical Class Activation Maps for Localization, IEEE Transactions on
        Image Processing 30, 2021, equations 5 to 7.
    """
    return (gradient.clamp(min=0) * activation).sum(1).clamp(min=0)


def hires_cam(activation: Tensor, gradient: Tensor) -> Tensor:
    """Weigh each position of each channel by its own gradient, signs and all.

    M = sum_k g_k A_k, signed. Where a single linear layer follows, M adds up to the score less its bias. Before a
    LayerNorm over the channels, which no factor of its input changes, M is 0: see `channel_sum`.

    Source:
        Draelos and Carin, Use HiResCAM instead of Grad-CAM for faithful explanations of convolutional neural networks,
        arXiv 2011.08891, 2020, section 3.
    """
    return channel_sum(gradient * activation)


def channel_sum(products: Tensor) -> Tensor:
    """Add up shares (N, C, *size) over the channels; 0 in a map, (*size), where they cancel but for rounding."""
    maps, magnitudes = products.sum(1), products.abs().sum(1)
    places = [*range(1, maps.dim())]
    cancelled = maps.abs().sum(places, keepdim=True) < _CANCELLED * magnitudes.sum(places, keepdim=True)
    return maps.masked_fill(cancelled, 0)


def _places(values: Tensor) -> tuple[int, ...]:
    return tuple(range(2, values.dim()))


CAMS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"grad-cam": grad_cam, "grad-cam++": grad_cam_plus_plus, "layer-cam": layer_cam, "hires-cam": hires_cam}
)
