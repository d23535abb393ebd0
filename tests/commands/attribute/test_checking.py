"""The sanity checks of whole runs: which are made, over what, and that they change nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookscope
from hookscope.results.attributions import Attributions


class Small(nn.Module):
    """Two convolutions, of which the second is followed by a function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first, self.act, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(self.act(self.first(x))))
        output: Tensor = self.head(x.mean((2, 3)))
        return output


def pictures(count: int = 2) -> Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def names(run: Attributions) -> list[str]:
    return [check.name for check in run.sanity]


@pytest.mark.parametrize("method", ["grad-cam", "guided-backprop"])
def test_every_run_is_checked_three_times_by_default(method: str) -> None:
    run = hookscope.attribute(Small(), pictures(), method=method)
    assert names(run) == ["weights", "class", "deletion"]
    assert all(-1 <= check.value <= 1 for check in run.sanity[:2])
    before, at_random = run.sanity[2].compared_with
    shares = [heat_map.target.probability for heat_map in run.maps]
    assert before == pytest.approx(np.mean([share for share in shares if share is not None]), abs=1e-6)
    assert 0 < at_random < 1
    assert all(check.meaning.endswith(".") and "\n" not in check.meaning for check in run.sanity)


def test_a_class_that_the_network_hardly_sees_has_no_deletion_check() -> None:
    network = Small()
    with torch.no_grad():
        network.head.bias[0] = -10.0
    run = hookscope.attribute(network, pictures(), target=0)
    assert names(run) == ["weights", "class"]
    assert any("the target's probability is below 0.05" in note for note in run.notes)


def test_why_there_is_no_deletion_check_is_said() -> None:
    network = Small()
    with torch.no_grad():
        network.head.bias[0] = torch.nan  # the gradient of a score does not depend on its bias
    dense = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 5, 3, padding=1))
    for run, reason in (
        (hookscope.attribute(network, pictures(), target=0), " where the target's probability is NaN."),
        (
            hookscope.attribute(dense, pictures(), target=0),
            ", because the target has a score at each place, and no single probability.",
        ),
    ):
        assert names(run) == ["weights", "class"]
        assert [note for note in run.notes if "deletion" in note] == [f"Sanity: no deletion test{reason}"]


class Silent(Small):
    """Its ReLU passes nothing on, so that each map of the picture is 0 everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(F.relu(self.second(self.act(self.first(x))) - 100).mean((2, 3)))
        return output


class Broken(Small):
    """Its scores are NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 0 * 0


@pytest.mark.parametrize(("network", "method"), [(Silent, "gradient"), (Broken, "grad-cam"), (Broken, "gradient")])
def test_maps_that_rank_no_place_are_not_said_to_pass(network: type[Small], method: str) -> None:
    run = hookscope.attribute(network(), pictures(), method=method)
    assert names(run) == []
    sanity = "Sanity: no tests of maps that are the same everywhere, hold NaN or Inf, or have fewer than 4 cells."
    assert sanity in run.notes
    assert run.warnings


def test_maps_of_three_cells_agree_too_often_by_chance_to_be_tested() -> None:
    network = nn.Sequential(nn.Conv1d(1, 4, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))
    run = hookscope.attribute(network, torch.randn(2, 1, 12), layer="0")
    assert names(run) == []
    assert any(note.endswith("or have fewer than 4 cells.") for note in run.notes)


def test_a_map_of_another_input_is_not_tested_by_blurring_the_first() -> None:
    class Pair(Small):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            output: Tensor = self.head(self.first(x).amax((2, 3)) + self.second(y).amax((2, 3)))
            return output

    y = torch.rand(2, 8, 16, 16)
    for layer, checks in (("first", ["weights", "class", "deletion"]), ("second", ["weights", "class"])):
        run = hookscope.attribute(Pair(), pictures(), input={"y": y}, layer=layer)
        assert names(run) == checks
        reason = "Sanity: no deletion test of layers from which no gradient leads to the input."
        assert (reason in run.notes) == (layer == "second")


def test_none_makes_no_check_but_completeness_is_always_known() -> None:
    assert hookscope.attribute(Small(), pictures(), sanity="none").sanity == ()
    run = hookscope.attribute(Small(), pictures(), method="integrated-gradients", sanity="none")
    assert names(run) == ["completeness"]
    assert run.sanity[0].passed


def test_a_failed_check_is_a_warning_that_says_what_it_means() -> None:
    run = hookscope.attribute(
        "demo", "sample_images/cat.jpg", method="guided-backprop", resize="96", crop="96", sanity="quick"
    )
    failed = [check for check in run.sanity if not check.passed]
    assert {"weights", "class"} <= {each.name for each in failed}
    sentences = [f"The sanity check '{each.name}' failed. {each.meaning}" for each in failed]
    assert [sentence.replace("--method", "`method`").replace("--target", "`target`") for sentence in sentences] == list(
        run.warnings
    )


def test_quick_looks_at_the_first_target_of_the_first_batch_and_full_at_all() -> None:
    network, forwards = Small(), []
    network.register_forward_hook(lambda *_: forwards.append(1))
    counts = {}
    for sanity in ("none", "quick", "full"):
        forwards.clear()
        hookscope.attribute(network, pictures(3), top=2, sanity=sanity, batch_size=1, method="gradient")
        counts[sanity] = len(forwards)
    checks = counts["quick"] - counts["none"]
    assert checks > 6
    assert counts["full"] - counts["none"] == 3 * 2 * checks


@pytest.mark.parametrize("method", ["integrated-gradients"])
def test_methods_of_many_passes_are_checked_throughout_only_where_that_is_asked_for(method: str) -> None:
    quick = hookscope.attribute(Small(), pictures(1), method=method)
    assert set(names(quick)) - {"completeness"} == {"deletion"}
    assert any(f"{method} takes many passes; `sanity` full runs them" in note for note in quick.notes)
    assert names(hookscope.attribute(Small(), pictures(1), method=method, sanity="full"))[:3] == [
        "weights",
        "class",
        "deletion",
    ]


def test_a_target_that_is_no_class_leaves_two_checks_out_and_says_so(tmp_path: Path) -> None:
    source = tmp_path / "own.py"
    source.write_text("def spread(output):\n    return output.std(1)\n", encoding="utf-8")
    for target in (f"{source}:spread", "1-2"):
        run = hookscope.attribute(Small(), pictures(), target=target)
        assert names(run) == ["weights"]
        assert "Sanity: no class and deletion tests, because the target is not a single class." in run.notes


def test_operations_as_layers_are_checked() -> None:
    run = hookscope.attribute(Small(), pictures(), layer="op:relu")
    assert [layer.label for layer in run.layers] == ["(model):relu"]
    assert names(run) == ["weights", "class", "deletion"]


def test_a_network_that_cannot_be_copied_is_explained_with_a_note() -> None:
    network = Small()
    network.lines = (letter for letter in "ab")  # type: ignore[assignment]
    run = hookscope.attribute(network, pictures())
    assert run.maps
    assert run.sanity == ()
    assert any(note.startswith("Sanity was not checked for some maps: Small cannot be copied") for note in run.notes)


class Moody(Small):
    """Counts its calls, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x + 0.1 * torch.randn_like(x) + 0.01 * self.calls)


@pytest.mark.parametrize("method", ["grad-cam", "gradient"])
def test_checks_change_neither_maps_nor_the_network(method: str) -> None:
    network = Moody()
    state = {name: value.clone() for name, value in network.state_dict().items()}

    def values(sanity: Any) -> list[np.ndarray[Any, Any]]:
        run = hookscope.attribute(network, pictures(3), method=method, batch_size=1, sanity=sanity)
        return [heat_map.values for heat_map in run.maps]

    for ours, theirs in zip(values("none"), values("full"), strict=True):
        assert np.array_equal(ours, theirs)
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in network.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_a_network_with_probabilities_as_output_is_not_given_a_second_softmax() -> None:
    network = nn.Sequential(Small(), nn.Softmax(1))
    run = hookscope.attribute(network, pictures(), method="gradient")
    assert run.sanity[2].compared_with[0] == pytest.approx(
        np.mean([heat_map.target.score for heat_map in run.maps]), abs=1e-6
    )
