"""Networks of many families, each small enough to run in a moment, and what to call them with."""

import itertools
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.models import detection
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.segmentation.fcn import FCN, FCNHead
from torchvision.models.swin_transformer import PatchMerging, PatchMergingV2, SwinTransformer, SwinTransformerBlockV2
from torchvision.models.vgg import make_layers
from torchvision.models.video.mvit import MSBlockConfig, MViT
from torchvision.models.video.resnet import BasicBlock as VideoBlock
from torchvision.models.video.resnet import BasicStem, Conv3DSimple, VideoResNet
from torchvision.models.video.swin_transformer import SwinTransformer3d

from hookscope.inputs.batches import Batch
from hookscope.results.inputs import InputRecord


@dataclass(frozen=True)
class Network:
    """How to build a network, and how to make what it is called with, both from the global random generator."""

    build: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]


def batch_of(*args: Any, first: int = 0, count: int = 1) -> Batch:
    """Return a batch of so many inputs, numbered from `first`."""
    record = InputRecord("tensor", None, None, (), ())
    return Batch(args, tuple(range(first, first + count)), (record,) * count)


def outputs_of(network: nn.Module, *inputs: Any) -> dict[str, Tensor]:
    """Run a network once in eval mode; return clones of what its modules gave, in the order in which they finished."""
    outputs: dict[str, Tensor] = {}

    def kept_as(name: str) -> Callable[..., None]:
        return lambda _module, _args, output: outputs.update({name: output.detach().clone()})

    handles = [module.register_forward_hook(kept_as(name)) for name, module in network.named_modules()]
    with torch.no_grad():
        network.eval()(*inputs)
    for handle in handles:
        handle.remove()
    return outputs


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def image(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(shape),)


def images_in_a_list() -> tuple[Any, ...]:
    return ([torch.rand(3, 64, 96)],)


# --- torchvision, thinner where its own are large ---


def small_swin(
    block: Callable[..., nn.Module] | None = None, merging: Callable[..., nn.Module] = PatchMerging
) -> nn.Module:
    """Return a Swin Transformer of the usual four stages."""
    depths, heads = [2, 2, 2, 2], [2, 4, 4, 8]
    return SwinTransformer([4, 4], 24, depths, heads, [7, 7], block=block, downsample_layer=merging)


def small_swin_v2() -> nn.Module:
    return small_swin(SwinTransformerBlockV2, PatchMergingV2)


def small_video_swin() -> nn.Module:
    return SwinTransformer3d([2, 4, 4], 24, [2, 2, 2, 2], [2, 4, 4, 8], [8, 7, 7])


def small_vit() -> nn.Module:
    """Return a Vision Transformer on 14 x 14 patches."""
    return torchvision.models.VisionTransformer(
        image_size=112, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=48
    )


def small_maxvit() -> nn.Module:
    return torchvision.models.MaxVit(
        input_size=(128, 128),
        stem_channels=8,
        partition_size=4,
        block_channels=[8, 24],
        block_layers=[1, 1],
        head_dim=4,
        stochastic_depth_prob=0.1,
    )


def small_mvit() -> nn.Module:
    """Return a Multiscale Vision Transformer; on 4 frames of 64 x 96 its grids are 2 x 16 x 24 and two halvings."""
    kernel, stay, halve = [3, 3, 3], [1, 1, 1], [1, 2, 2]
    return MViT(
        spatial_size=(64, 96),
        temporal_size=4,
        block_setting=[
            MSBlockConfig(1, 8, 8, kernel, kernel, stay, [1, 4, 4]),
            MSBlockConfig(2, 8, 16, kernel, kernel, halve, halve),
            MSBlockConfig(4, 16, 32, kernel, kernel, halve, stay),
        ],
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
    )


def vgg_with_a_small_head() -> nn.Module:
    with torch.device("meta"):  # its own head would have 120 million parameters
        vgg: nn.Module = torchvision.models.VGG(nn.Identity(), init_weights=False)
    vgg.features = make_layers([16, "M", 16, "M", 32, 32, "M", 32, 32, "M", 64, 64, "M"], batch_norm=True)
    vgg.classifier = nn.Sequential(nn.Dropout(), nn.Linear(64 * 7 * 7, 8), nn.ReLU(inplace=True), nn.Linear(8, 5))
    return vgg


def small_resnet(block: Any = BasicBlock, **options: Any) -> nn.Module:
    """Return a ResNet of one block a stage."""
    return torchvision.models.ResNet(block, [1, 1, 1, 1], **options)


def small_convnext() -> nn.Module:
    return ConvNeXt([CNBlockConfig(24, 48, 1), CNBlockConfig(48, None, 2)], stochastic_depth_prob=0.1, num_classes=7)


def small_video_resnet() -> nn.Module:
    return VideoResNet(VideoBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, num_classes=7)


def small_fcn() -> nn.Module:
    layers = IntermediateLayerGetter(small_resnet(), {"layer4": "out", "layer3": "aux"})
    return FCN(layers, FCNHead(512, 3), FCNHead(256, 3))


def pyramid() -> BackboneWithFPN:
    """Return what detectors look at: a small ResNet, and its four stages in 32 channels each."""
    return BackboneWithFPN(small_resnet(), {f"layer{n + 1}": str(n) for n in range(4)}, [64, 128, 256, 512], 32)


def vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: torchvision.models.get_model(name, weights=None, **options)


def detector(name: str, **options: Any) -> Callable[[], nn.Module]:
    return vision(name, weights_backbone=None, num_classes=3, **options)


SMALL = {"min_size": 64, "max_size": 96}
FEW_PROPOSALS = {"rpn_post_nms_top_n_train": 20, "rpn_post_nms_top_n_test": 20, "box_batch_size_per_image": 8}

TORCHVISION: dict[str, Network] = {
    "resnet18": Network(vision("resnet18"), image(2, 3, 64, 64)),
    "resnext": Network(lambda: small_resnet(Bottleneck, groups=32, width_per_group=4), image(1, 3, 32, 32)),
    "vgg11_bn": Network(vgg_with_a_small_head, image(1, 3, 32, 48)),
    "densenet121": Network(vision("densenet121"), image(1, 3, 32, 32)),
    "mobilenet_v2": Network(vision("mobilenet_v2"), image(1, 3, 32, 48)),
    "mobilenet_v3_small": Network(vision("mobilenet_v3_small"), image(2, 3, 32, 32)),
    "shufflenet_v2_x0_5": Network(vision("shufflenet_v2_x0_5"), image(1, 3, 64, 64)),
    "squeezenet1_1": Network(vision("squeezenet1_1"), image(1, 3, 64, 64)),
    "googlenet": Network(vision("googlenet", init_weights=False, aux_logits=True), image(1, 3, 64, 64)),
    "efficientnet_b0": Network(vision("efficientnet_b0"), image(1, 3, 64, 64)),
    "convnext": Network(small_convnext, image(1, 3, 32, 64)),
    "regnet_y_400mf": Network(vision("regnet_y_400mf"), image(1, 3, 64, 64)),
    "swin": Network(small_swin, image(1, 3, 64, 96)),
    "swin_v2": Network(small_swin_v2, image(1, 3, 64, 64)),
    "vit": Network(small_vit, image(2, 3, 112, 112)),
    "maxvit": Network(small_maxvit, image(1, 3, 128, 128)),
    "deeplabv3_mobilenet_v3_large": Network(
        detector("deeplabv3_mobilenet_v3_large", aux_loss=True), image(1, 3, 64, 64)
    ),
    "fcn": Network(small_fcn, image(1, 3, 32, 32)),
    "lraspp_mobilenet_v3_large": Network(detector("lraspp_mobilenet_v3_large"), image(1, 3, 64, 64)),
    "r3d": Network(small_video_resnet, image(1, 3, 4, 32, 32)),
    "mvit": Network(small_mvit, image(1, 3, 4, 64, 96)),
    "swin3d": Network(small_video_swin, image(1, 3, 4, 64, 64)),
    "raft_small": Network(
        vision("raft_small"), lambda: (torch.rand(1, 3, 128, 128) - 0.5, torch.rand(1, 3, 128, 128) - 0.5, 2)
    ),
    "fasterrcnn_mobilenet_v3_large_320_fpn": Network(
        detector("fasterrcnn_mobilenet_v3_large_320_fpn", box_detections_per_img=5, **FEW_PROPOSALS, **SMALL),
        images_in_a_list,
    ),
    "ssdlite320_mobilenet_v3_large": Network(
        detector("ssdlite320_mobilenet_v3_large", detections_per_img=5), images_in_a_list
    ),
    "retinanet": Network(lambda: detection.RetinaNet(pyramid(), 3, detections_per_img=5, **SMALL), images_in_a_list),
    "maskrcnn": Network(
        lambda: detection.MaskRCNN(pyramid(), 3, box_detections_per_img=3, **FEW_PROPOSALS, **SMALL), images_in_a_list
    ),
    "quantized resnet18": Network(
        lambda: torchvision.models.quantization.resnet18(weights=None, quantize=True), image(1, 3, 64, 64)
    ),
}

# --- by hand: what the above do not do ---


class Written(nn.Module):
    """A network whose parts are given by keyword and whose forward is a function of itself and its inputs."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Parameter | nn.Module):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def written(function: Callable[..., Any], **parts: Callable[[], nn.Module | Tensor]) -> Callable[[], nn.Module]:
    return lambda: Written(function, **{name: part() for name, part in parts.items()})


def linear(*sizes: int) -> Callable[[], nn.Module]:
    """Return a builder of a chain of linear layers with ReLU between them."""

    def build() -> nn.Module:
        parts: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(sizes):
            parts += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        return nn.Sequential(*parts[:-1])

    return build


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


class TwoLayers(nn.Module):
    """Case B1 of tests/hooks/test_hook_cases.py: fc1 = Linear(3, 4), relu1, fc2 = Linear(4, 1), with given weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.relu1, self.fc2 = nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)
        rows = [[1.0, 2, 3], [-4, -5, -6], [7, 8, 9], [-10, -11, -12]]
        with torch.no_grad():
            self.fc1.weight.copy_(torch.tensor(rows))
            self.fc1.bias.copy_(torch.tensor([1.0, 2, 3, 4]))
            self.fc2.weight.copy_(torch.tensor([[1.0, 2, 3, 4]]))
            self.fc2.bias.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.relu1(self.fc1(x)))


class TiedAutoencoder(nn.Module):
    """Decode with the encoder's own weight: one parameter under two names, and once without its module."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(12, 4, bias=False)
        self.decode = nn.Linear(4, 12, bias=False)
        self.decode.weight = nn.Parameter(self.encode.weight.detach().t().clone())
        self.again = nn.Linear(12, 4, bias=False)
        self.again.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        code = self.again(self.decode(torch.relu(self.encode(x))))
        return F.linear(code, self.encode.weight.t())


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh())
        self.head = nn.Linear(6, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=self.use_reentrant))


@dataclass
class ModelOutput:
    logits: Tensor
    hidden_states: tuple[Tensor, ...]
    loss: Tensor | None = None


class MappingOutput(OrderedDict[str, Any]):
    """An output that is a mapping and has its keys as attributes, as Hugging Face's are."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Attention(nn.Module):
    """Takes keywords, returns a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, *, hidden_states: Tensor, attention_mask: Tensor | None = None) -> MappingOutput:
        scores = self.query(hidden_states) @ self.key(hidden_states).transpose(1, 2) / math.sqrt(8)
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask == 0, -math.inf)
        return MappingOutput(last_hidden_state=scores.softmax(-1) @ self.value(hidden_states), attentions=(scores,))


class LanguageModel(nn.Module):
    """Tokens in, a dataclass out, keyword calls and a causal mask in between, the embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(16, 16).tril(), persistent=False)

    def forward(self, tokens: Tensor) -> ModelOutput:
        hidden = self.embedding(tokens)
        states = [hidden]
        length = tokens.shape[1]
        for layer in self.layers:
            mask = self.get_buffer("mask")[:length, :length]
            hidden = self.norm(hidden + layer(hidden_states=hidden, attention_mask=mask).last_hidden_state)
            states.append(hidden)
        return ModelOutput(self.head(hidden), tuple(states))


class Entry:
    """As a layer of transformers' caches: tensors beside what they are like."""

    __slots__ = ("dtype", "keys", "values")

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.dtype = keys, values, keys.dtype


class Cache:
    def __init__(self) -> None:
        self.layers: list[Entry] = []


class CachingAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        keys = self.project(x)
        cache.layers.append(Entry(keys, keys * 2))
        return x + torch.stack([layer.values for layer in cache.layers]).sum(0).tanh(), cache


class CachingModel(nn.Module):
    """Layers that share a cache, which each adds to: a copy of it, given to one, would miss what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CachingAttention() for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        cache = Cache()
        for layer in self.layers:
            x, _ = layer(x, cache=cache)
        return {"out": x, "cache": cache, "seen": deque([x.mean()]), "last": frozenset({x})}


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def noisy(net: Any, x: Tensor) -> Tensor:
    """Draw from every global generator: torch, Python, NumPy."""
    noise = torch.randn_like(x) * random.random() + np.random.rand()
    return net.second(F.dropout(torch.relu(net.first(x + noise)), 0.5, training=True))


def counting(net: Any, x: Tensor) -> Tensor:
    """Change buffers in every way: in place, through `.data`, by assigning another tensor, from None."""
    net.steps += 1
    net.average.data.mul_(0.9).add_(x.mean(0), alpha=0.1)
    net.latest = x.detach().clone()
    net.cache = x.detach() * 2
    return net.body(x + net.average)


def counting_network() -> nn.Module:
    model = Written(
        counting, body=linear(5, 4)(), steps=torch.tensor(0), average=torch.zeros(5), latest=torch.zeros(2, 5)
    )
    model.register_buffer("cache", None)
    return model


class StubbornlyFrozen(nn.Module):
    """Keep BatchNorm in eval mode whatever `train` is asked for, and freeze it in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = conv_net()
        self.norm = nn.BatchNorm1d(5)

    def train(self, mode: bool = True) -> "StubbornlyFrozen":
        super().train(mode)
        self.norm.eval()
        for parameter in self.norm.parameters():
            parameter.requires_grad_(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x))


def recurrent(net: Any, x: Tensor) -> tuple[Tensor, Any]:
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
    hidden, state = net.lstm(packed)
    padded, _ = nn.utils.rnn.pad_packed_sequence(hidden, batch_first=True)
    return net.gru(padded)[0], state


def unrolled(net: Any, x: Tensor) -> list[Tensor]:
    """Call one cell once per step: as many calls of one module."""
    state = torch.zeros(x.shape[0], 4)
    states = []
    for step in range(x.shape[1]):
        state = net.cell(x[:, step], state)
        states.append(net.head(state))
    return states


def ragged(net: Any, x: Tensor) -> tuple[Tensor, None, Tensor]:
    rows = torch.nested.nested_tensor([x[0, :2], x[1, :4]], layout=torch.jagged)
    return net.body(rows), net.nothing(x), net.head(x)


def functional_in_place(net: Any, x: Tensor) -> Tensor:
    """Overwrite outputs without any module that would say so."""
    out = F.relu_(net.first(x))
    skip = net.second(out)
    skip += out
    skip.mul_(0.5)
    net.third(skip)[:, 0].zero_()
    return net.third(skip).sigmoid_()


def without_gradients(net: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        features = net.body(x)
    return net.head(features.clone())


def with_gradients(net: Any, x: Tensor) -> Tensor:
    """Turn gradients on inside, and differentiate on the way, as networks that predict forces do."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = net.body(x)
        (force,) = torch.autograd.grad(energy.sum(), x)
    return net.head(force)


class Apply(nn.Module):
    """A leaf without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def leaf(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Apply(function)


def siamese(net: Any, first: Tensor, second: Tensor) -> dict[str, Any]:
    a, b = net.tower(first), net.tower(second)
    return {"distance": (a - b).norm(dim=1), "embeddings": (a, b), "note": "text"}


def early_exit(net: Any, x: Tensor) -> Tensor:
    """Skip a part, catch what another raises."""
    out = net.first(x)
    try:
        out = net.broken(out)
    except ValueError:
        out = net.fallback(out)
    return net.never(out) if out.numel() == 0 else out


def failing(_x: Tensor) -> Tensor:
    raise ValueError("this part always fails")


def with_users_hooks() -> nn.Module:
    model = conv_net()
    assert isinstance(model, nn.Sequential)
    model[0].register_forward_hook(lambda _module, _args, output: output + 1)
    model[3].register_forward_pre_hook(lambda _module, args: (args[0] * 2,))
    model[9].register_forward_hook(lambda *_: None, always_call=True)
    model.register_forward_pre_hook(lambda _module, args, kwargs: (args, kwargs), with_kwargs=True)
    return model


def parametrized() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    nn.utils.parametrizations.spectral_norm(model[0])
    nn.utils.parametrizations.weight_norm(model[2])
    return model


def shared_module() -> nn.Module:
    block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))
    return nn.Sequential(OrderedDict([("first", block), ("middle", nn.Linear(6, 6)), ("again", block)]))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


BY_HAND: dict[str, Network] = {
    "plain convolutions": Network(conv_net, image(2, 3, 8, 10)),
    "channels-last memory": Network(
        lambda: conv_net().to(memory_format=torch.channels_last),
        lambda: (torch.randn(2, 3, 8, 10).to(memory_format=torch.channels_last),),
    ),
    "shared module": Network(shared_module, image(2, 6)),
    "tied weights": Network(TiedAutoencoder, image(2, 12)),
    "frozen": Network(lambda: conv_net().requires_grad_(False), image(2, 3, 8, 8)),
    "partly frozen": Network(
        lambda: nn.Sequential(conv_net().requires_grad_(False), nn.Linear(5, 3)), image(2, 3, 8, 8)
    ),
    "stubbornly frozen BatchNorm": Network(StubbornlyFrozen, image(2, 3, 8, 8)),
    "checkpointing": Network(lambda: Checkpointed(use_reentrant=False), image(2, 6)),
    "reentrant checkpointing": Network(
        lambda: Checkpointed(use_reentrant=True), lambda: (torch.randn(2, 6, requires_grad=True),)
    ),
    "language model": Network(LanguageModel, lambda: (torch.randint(20, (2, 9)),)),
    "key-value cache": Network(CachingModel, image(2, 4)),
    "transformer encoder": Network(encoder, image(2, 5, 16)),
    "multi-head attention": Network(
        written(lambda net, x: net.attention(x, x, x), attention=lambda: nn.MultiheadAttention(8, 2, batch_first=True)),
        image(2, 5, 8),
    ),
    "random noise": Network(written(noisy, first=linear(6, 6), second=linear(6, 4, 2)), image(3, 6)),
    "changing buffers": Network(counting_network, image(2, 5)),
    "recurrent": Network(
        written(
            recurrent,
            lstm=lambda: nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True),
            gru=lambda: nn.GRU(12, 3, batch_first=True),
        ),
        image(2, 5, 4),
    ),
    "unrolled recurrent": Network(
        written(unrolled, cell=lambda: nn.RNNCell(3, 4), head=lambda: nn.Linear(4, 2)), image(2, 6, 3)
    ),
    "ragged and nothing": Network(
        written(ragged, body=linear(4, 3), nothing=leaf(lambda _: None), head=linear(4, 2)), image(2, 5, 4)
    ),
    "functional in-place": Network(
        written(functional_in_place, first=linear(4, 4), second=linear(4, 4), third=linear(4, 3)), image(3, 4)
    ),
    "inference mode inside": Network(written(without_gradients, body=conv_net, head=linear(5, 3)), image(2, 3, 8, 8)),
    "gradients inside": Network(written(with_gradients, body=linear(4, 4, 1), head=linear(4, 2)), image(3, 4)),
    "autocast inside": Network(
        written(torch.autocast("cpu", dtype=torch.bfloat16)(lambda net, x: net.body(x)), body=conv_net),
        image(2, 3, 8, 8),
    ),
    "complex spectrum": Network(
        written(
            lambda net, x: net.back(net.scale(net.to_spectrum(x))),
            to_spectrum=leaf(torch.fft.rfft2),
            scale=leaf(lambda z: z * torch.tensor(0.5 + 1j)),
            back=leaf(torch.fft.irfft2),
        ),
        image(2, 3, 8, 8),
    ),
    "siamese with a dict": Network(
        written(siamese, tower=linear(4, 5, 3)), lambda: (torch.randn(2, 4), torch.randn(2, 4))
    ),
    "dict input": Network(
        written(
            lambda net, batch: {"scores": net.head(net.join(left=batch["image"], right=batch["mask"]))},
            join=leaf(lambda left, right: left * right),
            head=linear(4, 2),
        ),
        lambda: ({"image": torch.randn(2, 4), "mask": torch.ones(2, 4), "id": 7},),
    ),
    "part that raises": Network(
        written(early_exit, first=linear(4, 4), broken=leaf(failing), fallback=linear(4, 3), never=linear(3, 3)),
        image(2, 4),
    ),
    "user's hooks": Network(with_users_hooks, image(2, 3, 8, 8)),
    "parametrized weights": Network(parametrized, image(2, 6)),
    "dtypes and odd values": Network(
        written(
            lambda net, x: tuple(part(x) for part in net.children()),
            wide=leaf(lambda x: x.double() * 1e100),
            narrow=leaf(lambda x: x.half()),
            sign=leaf(lambda x: x > 0),
            top=leaf(lambda x: x.max(1)),
            empty=leaf(lambda x: x[:0]),
            huge=leaf(lambda x: x * 1e30),
            broken=leaf(lambda x: torch.where(x > 1, math.nan, x / (x > 0).float())),
        ),
        image(4, 30),
    ),
    "bfloat16": Network(lambda: conv_net().bfloat16(), lambda: (torch.randn(2, 3, 8, 8).bfloat16(),)),
    "double": Network(lambda: conv_net().double(), lambda: (torch.randn(2, 3, 8, 8).double(),)),
    "compiled": Network(lambda: compiled(conv_net()), image(2, 3, 8, 8)),
    "compiled part": Network(lambda: nn.Sequential(conv_net(), compiled(linear(5, 5, 3)())), image(2, 3, 8, 8)),
    "DataParallel": Network(lambda: nn.DataParallel(conv_net()), image(2, 3, 8, 8)),
    "single layer": Network(lambda: nn.Linear(4, 3), image(2, 4)),
}

NETWORKS: dict[str, Network] = {**TORCHVISION, **BY_HAND}

# One network for each mechanism, all small: `pytest -m exhaustive` runs the others.
MECHANISMS = (
    *("resnext", "vit", "retinanet", "quantized resnet18"),  # sums in place; tokens; lists of boxes; int8
    *("channels-last memory", "dtypes and odd values", "bfloat16", "complex spectrum", "ragged and nothing"),
    *("shared module", "tied weights", "parametrized weights", "stubbornly frozen BatchNorm", "changing buffers"),
    *("checkpointing", "reentrant checkpointing", "functional in-place", "inference mode inside", "gradients inside"),
    *("language model", "key-value cache", "dict input", "recurrent", "transformer encoder", "autocast inside"),
    *("random noise", "part that raises", "user's hooks", "compiled part", "DataParallel"),
)

# These do what another here does; where only numbers of operations differ, they are left out.
_LIKE_OTHERS = {
    *("resnet18", "vgg11_bn", "mobilenet_v2", "mobilenet_v3_small", "squeezenet1_1", "efficientnet_b0"),
    *("regnet_y_400mf", "swin_v2", "maxvit", "deeplabv3_mobilenet_v3_large", "fcn", "lraspp_mobilenet_v3_large"),
    *("r3d", "swin3d", "ssdlite320_mobilenet_v3_large", "maskrcnn", "frozen", "double"),
}
KINDS = [name for name in NETWORKS if name not in _LIKE_OTHERS]


def pictures_with_boxes() -> tuple[Any, ...]:
    """Return what detectors are trained with: two pictures, two boxes in each."""
    boxes = torch.tensor([[8.0, 8.0, 40.0, 40.0], [30.0, 20.0, 60.0, 60.0]])
    target = {"boxes": boxes, "labels": torch.tensor([1, 2])}
    return [torch.rand(3, 64, 96), torch.rand(3, 64, 96)], [target, dict(target)]


# What networks are called with in training where it differs: BatchNorm needs more than one value per channel.
TRAINED: dict[str, Callable[[], tuple[Any, ...]]] = {
    **dict.fromkeys(("resnext", "densenet121", "shufflenet_v2_x0_5", "googlenet", "convnext"), image(2, 3, 64, 64)),
    **dict.fromkeys(("fasterrcnn_mobilenet_v3_large_320_fpn", "retinanet"), pictures_with_boxes),
}
