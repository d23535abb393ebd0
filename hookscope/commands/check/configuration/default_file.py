"""The default configuration as a file, with every rule and every key explained."""

from collections.abc import Iterator
from textwrap import wrap

from hookscope.commands.check.configuration.document import key_of
from hookscope.rules import RULES
from hookscope.rules.rule import Rule

_WIDTH = 120

_BEFORE_RULES = """\
# Settings of `hookscope check`. As written, this file changes nothing: it lists the defaults. Change or delete what you
# like: a setting that is left out keeps its default. Paths are relative to this file. The same tables may stand in
# pyproject.toml, below [tool.hookscope].

[model]
# The network, if it cannot be inferred from names and shapes in the checkpoint: a name, FILE.py:NAME or
# package.module:NAME; "none" checks what the file stores, without a network.
#arch = "resnet18"
# Arguments of the function that builds it.
#arguments = { num_classes = 10 }
# Where in the file the weights are, if there are several.
#key = "ema"
# Names that the file may lack, and names in the file that the network may lack: globs.
#allow-missing = ["fc.*"]
#allow-unexpected = ["head.*"]
# Classes and functions, beside plain data, that a pickle may name: globs. They are read past, and never imported.
#allow-global = ["vendornet.Net"]
# Names of the classes, a line each or JSON, if they do not come with the weights.
#classes = "classes.txt"

[input]
# Pictures, tensor files and folders to run the network on. Without any it is run on two inputs of noise: enough for
# rules about numbers; a dead channel is only known from real pictures, the more the better.
#images = ["cat.jpg", "pictures/"]
# Labelled pictures, for the accuracy: a folder of class folders, a CSV file with a path and a label on each line, or
# JSON. With multi-label, below, a picture may have several labels.
# Labels are names or indices of classes, or as many folders in sorted order as there are classes.
#data = "val/"
# Run directory of `hookscope survey` of this network: rules about activations look at all of its inputs.
#survey = "survey-model/"
# Shape of the noise, batch first, if it cannot be inferred. Only without images. A text has dtype and bound too; for
# several arguments it is a list of shapes, or a table by name: shape = { tokens = "2,20:int64<1000", meta = [2, 5] }.
#shape = [2, 3, 224, 224]
# How a picture becomes an input; without these, as the weights were trained, else as is usual for ImageNet.
# Sizes are pixels of the shorter side, "HEIGHTxWIDTH" or "none"; mean and std one number, one per channel, or "none".
#resize = 256
#crop = 224
#mean = [0.485, 0.456, 0.406]
#std = [0.229, 0.224, 0.225]
# Refuse pictures of more pixels.
#max-pixels = 89478485
# Which axis of a tensor file counts inputs: "auto" takes the first of (N, C, H, W); or "none".
#batch-axis = 0
# Inputs by name: numbers, and pictures or tensor files.
#named = { sampling_rate = 16000, mask = "mask.npy" }
# Inputs per forward pass.
batch-size = 8
# Seed of the noise and of everything else that is random.
seed = 0

[output]
# What the network must return: "N" is the number of inputs, "*" any size.
#shape = ["N", 1000]
#dtype = "float32"
# Which of several outputs has the class scores.
#key = "logits"
# Each class is a label by itself: scores are read as sigmoids, not as a softmax.
#multi-label = true

[gradients]
# For the rules about gradients, which are off below. The loss as for `hookscope grads --loss`: a random projection of
# all outputs needs no target.
loss = "projection"
# A class by name or index, "zeros", "noise", or a file of targets; without one, the loss's own.
#target = "zeros"
# "train": with dropout, and BatchNorm by batch statistics.
mode = "eval"

[rules]
# A rule is at a level ("fail", "warn" or "off"), or in a table of level and limits. Only "fail" makes the check fail.
# Limits whose basis is no standard and no paper are ours.
"""

_AFTER_RULES = """
# Other levels and limits for some layers; patterns as for --layer, and a later one overrides an earlier one.
#[[layers]]
#pattern = "layer4.*"
#dead-channels = "off"

# What the network must predict for a named picture: the best class, classes among the best k, and the least probability
# of the best one. Classes by name or index.
#[[expect]]
#image = "cat.jpg"
#top1 = "Egyptian cat"
#contains = ["tabby"]
#k = 5
#min-probability = 0.3

# Statistics to compare each layer with; `--update-baseline` writes them. How far they may drift are limits of the rule
# drift.
#[baseline]
#file = "baseline.json"
"""


def default_text() -> str:
    """Return a configuration file that changes nothing and explains everything."""
    return "".join((_BEFORE_RULES, *(f"{line}\n" for rule in RULES.values() for line in _lines(rule)), _AFTER_RULES))


def _lines(rule: Rule) -> Iterator[str]:
    yield ""
    yield from _comment(rule.meaning)
    for name, limit in rule.limits.items():
        yield from _comment(f"{key_of(name)}: {limit.meaning}.{f' Basis: {limit.basis}.' if limit.basis else ''}")
    if rule.limits:
        numbers = {key_of(name): repr(limit.default).removesuffix(".0") for name, limit in rule.limits.items()}
        limits = "".join(f", {name} = {number}" for name, number in numbers.items())
        yield f'{rule.identifier} = {{ level = "{rule.level}"{limits} }}'
    else:
        yield f'{rule.identifier} = "{rule.level}"'


def _comment(text: str) -> list[str]:
    return wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
