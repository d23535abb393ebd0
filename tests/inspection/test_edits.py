"""Edit expressions: what they mean, where they are wrong, and what they do to tensors."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hookscope
from hookscope.errors import LayerNotFoundError, UsageError
from hookscope.inspection.edits import OPERATIONS, Edit, bind_edits, parse_edit
from tests.networks import normal


def edited(operation: str, tensor: Tensor, channel_axis: int | None = 1) -> Tensor:
    return parse_edit(f"x:output:{operation}").apply(tensor, channel_axis)


# --- Reading ---


@pytest.mark.parametrize(
    ("text", "pattern", "place", "operation", "arguments"),
    [
        ("relu:grad:clamp(min=0)", "relu", "grad", "clamp", {"min": 0}),
        ("relu:grad:clamp(-1, max=6)", "relu", "grad", "clamp", {"min": -1, "max": 6}),
        ("relu:grad:clamp(max=6,min=-1e-3)", "relu", "grad", "clamp", {"min": -0.001, "max": 6}),
        ("fc*bias:grad:zero()", "fc*bias", "grad", "zero", {}),
        ("layer1:output:scale(2)", "layer1", "output", "scale", {"by": 2}),
        ("*:grad:clip-norm(max=1)", "*", "grad", "clip-norm", {"max": 1}),
        # Patterns may hold colons, spaces and parentheses: the last place counts.
        ("!type:conv@-1:output:zero", "!type:conv@-1", "output", "zero", {}),
        ("/^(a|b):x$/:input:zero", "/^(a|b):x$/", "input", "zero", {}),
        ("/:grad:(a)/:output:zero", "/:grad:(a)/", "output", "zero", {}),
        ("a:input:grad:zero", "a:input", "grad", "zero", {}),
    ],
)
def test_an_expression_is_a_pattern_a_place_and_an_operation(
    text: str, pattern: str, place: str, operation: str, arguments: dict[str, float]
) -> None:
    edit = parse_edit(text)
    assert edit == Edit(text, pattern, place, False, operation, arguments)  # place is a str here


@pytest.mark.parametrize(
    ("operation", "arguments", "channels", "seed"),
    [
        ("zero(channels=3,7)", {}, (3, 7), 0),
        ("zero(channels=3,8-10,1)", {}, (3, 8, 9, 10, 1), 0),
        ("scale(2, 0-1, 7-7)", {"by": 2}, (0, 1, 7), 0),
        ("noise(channels=0-2, std=0.1)", {"std": 0.1}, (0, 1, 2), 0),
        ("scale(channels=0,1,by=2)", {"by": 2}, (0, 1), 0),
        ("noise(0.1, 3)", {"std": 0.1}, (), 3),
        ("noise(seed=9223372036854775807, std=0)", {"std": 0}, (), 2**63 - 1),
        ("clamp(max=1, channels=2147483647)", {"max": 1}, (2**31 - 1,), 0),
    ],
)
def test_channels_take_all_numbers_up_to_the_next_name(
    operation: str, arguments: dict[str, float], channels: tuple[int, ...], seed: int
) -> None:
    edit = parse_edit(f"x:output:{operation}")
    assert (edit.arguments, edit.channels, edit.seed) == (arguments, channels, seed)


# --- What is wrong, and where ---


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        # The caret stands under the character after ^.
        ("relu^", "an edit is PATTERN:PLACE:OPERATION"),
        ("relu:^clamp(min=0)", "before the operation a place is missing"),
        ("relu:^gard:zero", "there is no place 'gard', only input, output, grad and value. Nearest: 'grad'"),
        ("/(a|b)/:^outptu:zero", "there is no place 'outptu', only input, output, grad and value. Nearest: 'output'"),
        ("^:grad:zero", "the pattern of layers or parameters is missing"),
        ("param:^:grad:zero", "the pattern of layers or parameters is missing"),
        ("param:fc:^output:zero", "a parameter has no output: give grad or value"),
        ("relu:grad:^", "an operation is missing here. Give zero, scale, add, clamp, clip-norm, noise"),
        ("relu:grad:^clmap(min=0)", "there is no operation 'clmap'. Nearest: 'clamp'"),
        ("relu:grad:^q", "there is no operation 'q'. Give zero, scale"),
        ("relu:grad:clamp(^mim=0)", "clamp takes no 'mim', only min, max, channels. Nearest: 'min'"),
        ("relu:grad:clamp(min=0, ^min=1)", "min is given twice"),
        ("relu:grad:clamp(min=0, ^6)", "arguments after a named one need names"),
        ("relu:grad:clip-norm(1, ^2)", "clip-norm takes no more than max"),
        ("relu:grad:clamp(min=^)", "min has to be a number"),
        ("relu:grad:scale(^1e999)", "by has to be finite"),
        ("relu:grad:scale(2^", "a comma or a closing parenthesis is missing here"),
        ("relu:grad:scale(2)^)", "the expression should have ended here"),
        ("relu:grad:scale^", "scale needs by: scale(by=...)"),
        ("relu:grad:clamp^", "clamp needs min or max: clamp(min=...)"),
        ("relu:grad:clamp(^)", "clamp needs min or max"),
        ("relu:grad:noise(seed=1^)", "noise needs std: noise(std=...)"),
        ("relu:grad:clamp(max=0, min=^1)", "min is above max"),
        ("relu:grad:noise(^-1)", "std has to be not negative"),
        ("relu:grad:zero(channels=^-1)", "a channel is a whole number from 0"),
        ("relu:grad:zero(channels=^99999999999)", "a channel is a whole number from 0"),
        ("relu:grad:zero(channels=^)", "a channel is a whole number from 0"),
        ("relu:grad:zero(channels=^3-)", "a channel is a whole number from 0"),
        ("relu:grad:zero(channels=3^-1)", "a range from channel 3 must end between 3 and 65538"),
        ("relu:grad:scale(2, ^)", "a channel is a whole number from 0"),
        ("relu:grad:noise(1, seed=^9223372036854775808)", "a seed is a whole number from 0"),
        ("relu:grad:noise(1, seed=^1e3)", "a seed is a whole number from 0"),
        ("relu:grad:scale(^٣)", "by has to be a number"),
    ],
)
def test_what_is_wrong_is_said_with_a_caret_at_the_place(marked: str, message: str) -> None:
    position, text = marked.index("^"), marked.replace("^", "", 1)
    with pytest.raises(UsageError) as caught:
        parse_edit(text)
    said, expression, caret = str(caught.value).split("\n")
    assert said.startswith("Bad edit: ")
    assert said.endswith(".")
    assert message in said
    assert (expression, caret) == (text, " " * position + "^")


def test_a_caret_in_text_with_control_characters_stands_under_what_is_shown() -> None:
    with pytest.raises(UsageError) as caught:
        parse_edit("a\n\x1b:gard:zero")
    assert str(caught.value).split("\n")[1:] == ["a\\n\\x1b:gard:zero", "        ^"]
    assert all(line.isprintable() for line in str(caught.value).split("\n"))


_MARKS = ("param:", ":grad:", ":output:", ":", "(", ")", ",", "=", " ", "\n", "::error::", "\ud800", ".")
_WORDS = ("relu", "/a:b/", "*", "[", "min", "max", "channels", "seed", "std", "by", "0", "-1.5", "1e9", "nan", "٣")
_PIECES = st.sampled_from([*OPERATIONS, *_MARKS, *_WORDS])


@given(st.one_of(st.text(), st.lists(_PIECES, max_size=14).map("".join)))
@example("x:grad:zero(" + "1," * 5000)
@example("x:grad:scale(" + "9" * 5000 + ")")
@example("x:grad:zero(" + "9" * 5000 + ")")
@example(":" * 5000)
@settings(max_examples=40)
@pytest.mark.exhaustive
def test_any_text_is_an_edit_or_a_usage_error_of_three_lines(text: str) -> None:
    try:
        edit = parse_edit(text)
    except UsageError as error:
        lines = str(error).split("\n")
        assert len(lines) == 3
        assert all(line.isprintable() for line in lines)
        assert lines[2].strip() == "^"
        assert len(lines[2]) <= len(lines[1]) + 1
    else:
        assert edit.text == text
        assert edit.operation in OPERATIONS
        if not edit.channels:
            assert edit.apply(torch.ones(1, 2), None).shape == (1, 2)


# --- What edits do ---

KINDS = [(torch.float64, ()), (torch.float32, (2, 3, 4, 5)), (torch.bfloat16, (6,)), (torch.float16, (0, 3))]


def expected(operation: str, x: Tensor) -> Tensor:
    """Return what an operation means, in plain arithmetic."""
    wide = x.double()
    norm = math.hypot(*wide.flatten().tolist())
    result = {
        "zero": lambda: wide * 0,
        "scale(-2.5)": lambda: wide * -2.5,
        "add(0.25)": lambda: wide + 0.25,
        "clamp(min=0)": lambda: (wide + wide.abs()) / 2,
        "clamp(max=0)": lambda: (wide - wide.abs()) / 2,
        "clamp(-0.5, 0.5)": lambda: torch.minimum(torch.maximum(wide, torch.tensor(-0.5)), torch.tensor(0.5)),
        "clip-norm(max=0.5)": lambda: wide if norm <= 0.5 else wide / norm * 0.5,
        "clip-norm(max=1000)": lambda: wide if norm <= 1000 else wide / norm * 1000,
        "noise(std=0.5, seed=3)": lambda: wide + 0.5 * normal(*x.shape, seed=3).double(),
        "noise(std=0)": lambda: wide,
    }[operation]()
    return result.to(x.dtype)


OPERATION_TEXTS = ["zero", "scale(-2.5)", "add(0.25)", "clamp(min=0)", "clamp(max=0)", "clamp(-0.5, 0.5)"]
OPERATION_TEXTS += ["clip-norm(max=0.5)", "clip-norm(max=1000)", "noise(std=0.5, seed=3)", "noise(std=0)"]


@pytest.mark.parametrize("operation", OPERATION_TEXTS)
@pytest.mark.parametrize(("dtype", "shape"), KINDS)
def test_an_operation_is_the_arithmetic_and_nothing_else(
    operation: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = normal(*shape, seed=1).to(dtype)
    before = x.clone()
    result = edited(operation, x)
    torch.testing.assert_close(result, expected(operation, x))
    assert (result.shape, result.dtype) == (x.shape, dtype)
    assert result is not x
    assert torch.equal(x, before)
    assert result.data_ptr() != x.data_ptr() or not x.numel()


@pytest.mark.parametrize("operation", [text for text in OPERATION_TEXTS if not text.startswith("clip")])
@pytest.mark.parametrize(("shape", "axis"), [((2, 5, 3, 3), 1), ((2, 3, 5), 2), ((5, 2), 0)])
def test_channels_confine_an_operation(operation: str, shape: tuple[int, ...], axis: int) -> None:
    x = normal(*shape, seed=1)
    name, _, rest = operation.partition("(")
    everywhere = edited(operation, x, axis)
    confined = edited(f"{name}({rest.removesuffix(')')}{', ' if rest else ''}channels=1,4)", x, axis)
    for channel in range(5):
        source = everywhere if channel in (1, 4) else x
        assert torch.equal(confined.select(axis, channel), source.select(axis, channel))


def test_clipping_holds_the_norm_of_values_whose_squares_overflow() -> None:
    x = torch.tensor([3e30, -4e30])
    torch.testing.assert_close(edited("clip-norm(max=1)", x), torch.tensor([0.6, -0.8]))
    torch.testing.assert_close(
        edited("clip-norm(max=1)", torch.tensor([60000.0, 0], dtype=torch.half)).sum().item(), 1.0
    )


def test_clipping_leaves_zeros_alone() -> None:
    x = torch.zeros(3, requires_grad=True)
    result = edited("clip-norm(max=2)", x)
    assert result.tolist() == [0, 0, 0]
    assert torch.autograd.grad(result.sum(), x)[0].tolist() == [1, 1, 1]


def test_zero_makes_zeros_of_nan_and_inf() -> None:
    x = torch.tensor([[math.nan, math.inf, 1.0]])
    assert edited("zero", x).tolist() == [[0, 0, 0]]
    assert edited("zero(channels=0,1)", x).tolist() == [[0, 0, 1]]


def test_nan_outside_the_channels_stays_and_does_not_spread() -> None:
    x = torch.tensor([[math.nan, 2.0]], requires_grad=True)
    result = edited("scale(3, channels=1)", x)
    assert math.isnan(result[0, 0].item())
    assert torch.autograd.grad(result.sum(), x)[0].tolist() == [[1, 3]]


@pytest.mark.parametrize(
    ("operation", "slopes"),
    [
        ("zero", [0, 0, 0]),
        ("zero(channels=1)", [1, 0, 1]),
        ("scale(3)", [3, 3, 3]),
        ("add(3)", [1, 1, 1]),
        ("clamp(min=0)", [0, 1, 1]),
        ("noise(1)", [1, 1, 1]),
        ("clip-norm(max=100)", [1, 1, 1]),
    ],
)
def test_an_edited_tensor_keeps_its_graph(operation: str, slopes: list[float]) -> None:
    x = torch.tensor([[-1.0, 2.0, 3.0]], requires_grad=True)
    assert torch.autograd.grad(edited(operation, x).sum(), x)[0].tolist() == [slopes]


def test_eight_bit_floats_are_edited_too() -> None:
    x = torch.tensor([[1.0, -2.0]]).to(torch.float8_e4m3fn)
    result = edited("scale(2, channels=1)", x)
    assert (result.dtype, result.float().tolist()) == (torch.float8_e4m3fn, [[1, -4]])


@pytest.mark.parametrize("tensor", [torch.tensor([1, 2]), torch.tensor([1j]), torch.eye(2).to_sparse()])
@pytest.mark.parametrize("operation", ["zero", "clamp(min=0)", "zero(channels=9)"])
def test_what_is_not_dense_and_floating_comes_back_itself(tensor: Tensor, operation: str) -> None:
    assert edited(operation, tensor, 0) is tensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_come_back_themselves() -> None:
    for layout in (torch.strided, torch.jagged):
        tensor = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
        assert edited("zero", tensor) is tensor


@pytest.mark.parametrize(
    ("shape", "axis", "message"),
    [
        (
            (2, 3, 4),
            1,
            r"Edit 'x:output:zero\(channels=1,3\)' names channel 3, but a tensor of shape 2x3x4 has 3 on axis 1",
        ),
        ((2, 3), None, "but a tensor of shape 2x3 has no axis that counts its channels"),
        ((), None, "but a tensor of shape scalar has no axis that counts its channels"),
    ],
)
def test_a_channel_that_is_not_there_is_refused_with_the_size(
    shape: tuple[int, ...], axis: int | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        edited("zero(channels=1,3)", normal(*shape), axis)
    assert "\n" not in str(caught.value)


# --- What edits are about ---


def network() -> nn.Module:
    return nn.ModuleDict(
        {"conv": nn.Conv2d(3, 4, 1), "relu": nn.ReLU(), "fc1": nn.Linear(4, 2), "fc2": nn.Linear(2, 1)}
    )


def bound(*texts: str) -> list[tuple[str, str, str]]:
    actual = bind_edits([parse_edit(text) for text in texts], network())
    return [(name, edit.place, edit.operation) for name, edit in actual]


@pytest.mark.parametrize(
    ("text", "expected_names", "place"),
    [
        ("fc:grad:zero", ["fc1", "fc2"], "grad"),
        ("type:linear:output:zero", ["fc1", "fc2"], "output"),
        ("conv:input:zero", ["conv"], "input"),
        ("(model):output:zero", [""], "output"),
        ("fc*bias:grad:zero", ["fc1.bias", "fc2.bias"], "parameter grad"),
        ("bias:grad:zero", ["conv.bias", "fc1.bias", "fc2.bias"], "parameter grad"),
        ("param:fc1:grad:zero", ["fc1.weight", "fc1.bias"], "parameter grad"),
        (
            "param:*:grad:zero",
            [f"{layer}.{kind}" for layer in ("conv", "fc1", "fc2") for kind in ("weight", "bias")],
            "parameter grad",
        ),
    ],
)
def test_an_edit_is_about_layers_or_else_about_parameters(text: str, expected_names: list[str], place: str) -> None:
    assert bound(text) == [(name, place, "zero") for name in expected_names]


def test_edits_keep_their_order() -> None:
    assert bound("fc2:grad:zero", "conv:output:scale(2)", "fc2:grad:add(1)") == [
        ("fc2", "grad", "zero"),
        ("conv", "output", "scale"),
        ("fc2", "grad", "add"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fcc1.bais:grad:zero", "No layer matches 'fcc1.bais'.* No parameter matches either. Nearest: 'fc1.bias'"),
        ("fc*bias:output:zero", r"No layer matches 'fc\*bias'"),
        ("param:relu:grad:zero", "Edit 'param:relu:grad:zero' matches no parameter."),
        ("param:\x1b:grad:zero", "matches no parameter"),
    ],
)
def test_an_edit_that_is_about_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(LayerNotFoundError, match=message) as caught:
        bound(text)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("pattern", ["/(/", "/a{99999999999}/"])
def test_an_expression_that_is_none_is_refused_with_a_caret(pattern: str) -> None:
    with pytest.raises(UsageError) as caught:
        bound(f"param:{pattern}:grad:zero")
    assert "this is not a regular expression" in str(caught.value)
    assert str(caught.value).split("\n")[1:] == [f"param:{pattern}:grad:zero", "      ^"]


def test_neither_noise_nor_channels_depend_on_the_users_defaults() -> None:
    model, edits = nn.Sequential(nn.Conv2d(3, 4, 3)), ["0:output:noise(0.5, channels=1)", "param:0.bias:value:noise(1)"]
    wanted = {"input_shape": "2,3,8,8", "edit": edits, "save_tensors": True, "cost": True}
    expected = hookscope.activations(model, **wanted)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            run = hookscope.activations(model, **wanted)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(run.tensors["0"], expected.tensors["0"])
    assert run.cost.whole.total == expected.cost.whole.total


def test_layers_of_equal_shape_get_different_noise_and_the_same_layer_the_same() -> None:
    edits = [parse_edit("fc:output:noise(1)")]

    def noises(names: Sequence[str]) -> dict[str, Tensor]:
        layers = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
        return {name: edit.apply(torch.zeros(30), None) for name, edit in bind_edits(edits, layers)}

    first, again = noises(["fc1", "fc2"]), noises(["fc2", "fc1"])
    assert not torch.equal(first["fc1"], first["fc2"])
    assert all(torch.equal(first[name], again[name]) for name in first)
