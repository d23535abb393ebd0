"""Labels that are independent of each other: scores are sigmoids wherever best classes are shown."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookscope
from tests.networks import Written

NAMES = ["cat", "dog", "fox", "owl"]


def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    return net.eval()


def pictures() -> Tensor:
    return torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def test_best_classes_are_sigmoids_in_every_command() -> None:
    net, x = network(), pictures()
    best = net(x).detach().sigmoid().topk(4).values
    options = {"multi_label": True, "classes": NAMES}
    runs = [
        hookscope.activations(net, x, **options).predictions,
        hookscope.grads(net, x, loss="bce", **options).predictions,
        hookscope.diff(net, net, x, **options).outputs[0].predictions[1],
    ]
    for predictions in runs:
        assert [prediction.reading for prediction in predictions] == ["sigmoid"] * 2
        for prediction, expected in zip(predictions, best, strict=True):
            assert prediction.probabilities == pytest.approx(expected.tolist(), abs=1e-6)
    for heat_map in hookscope.attribute(net, x, top=2, sanity="none", **options).maps:
        index = NAMES.index(heat_map.target.label)
        expected = float(net(x)[heat_map.input_index, index].sigmoid().detach())
        assert (heat_map.target.reading, heat_map.target.probability) == ("sigmoid", pytest.approx(expected, abs=1e-6))


def test_without_the_option_they_are_a_softmax_and_say_so() -> None:
    run = hookscope.activations(network(), pictures(), classes=NAMES)
    assert sum(run.predictions[0].probabilities) == pytest.approx(1)
    assert "(softmax)" in str(run)
    assert "(sigmoid)" in str(hookscope.activations(network(), pictures(), classes=NAMES, multi_label=True))


@pytest.mark.parametrize("multi_label", [False, True])
def test_values_of_0_to_1_stay_as_they_are(multi_label: bool) -> None:
    net = nn.Sequential(network(), nn.Sigmoid() if multi_label else nn.Softmax(1))
    (one, _) = hookscope.activations(net, pictures(), classes=NAMES, multi_label=multi_label).predictions
    assert one.reading == "as returned"
    assert one.probabilities == pytest.approx(net(pictures())[0].detach().topk(4).values.tolist(), abs=1e-6)


def test_a_single_score_is_one_label() -> None:
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 1)).eval()
    (one, _) = hookscope.attribute(net, pictures(), sanity="none", multi_label=True).maps
    assert one.target.probability == pytest.approx(float(net(pictures())[0].sigmoid().detach()), abs=1e-6)


def test_the_divergence_of_labels_is_that_of_coins() -> None:
    net, other, x = network(), network(), pictures()
    with torch.no_grad():
        other[-1].bias.add_(torch.tensor([1.0, -2.0, 0.5, 0.0]))
        p, q = net(x).double().sigmoid(), other(x).double().sigmoid()
    coins = [torch.distributions.Bernoulli(case) for case in (p, q)]
    expected = float(torch.distributions.kl_divergence(*coins).sum(1).mean())
    assert hookscope.diff(net, other, x, multi_label=True).outputs[0].kl == pytest.approx(expected, rel=1e-5)


def test_deletion_and_runner_up_follow_the_labels() -> None:
    net, x = network(), pictures() * 5
    checks = hookscope.attribute(net, x, target=1, multi_label=True).sanity
    deletions = [check for check in checks if check.name == "deletion"]
    assert deletions
    assert deletions[0].compared_with[0] == pytest.approx(float(net(x)[:, 1].sigmoid().mean().detach()), abs=1e-6)


def test_check_reads_expectations_as_sigmoids(tmp_path: Path) -> None:
    torch.save(pictures()[0], tmp_path / "x.pt")
    best = float(network()(pictures()[:1]).detach().sigmoid().max())
    wanted = f"[[expect]]\nimage = 'x.pt'\nmin-probability = {best + 0.01}\n"
    (tmp_path / "c.toml").write_text(f"[output]\nmulti-label = true\n{wanted}")
    report = hookscope.check(network(), config=tmp_path / "c.toml", select="expectation")
    (finding,) = report.findings
    assert f"with probability {best:.3f} (sigmoid; limit: at least" in finding.message


@pytest.mark.parametrize("decide", [lambda x: x > 0, lambda x: (x > 0).long(), Tensor.to_sparse])
def test_decisions_and_sparse_outputs_have_no_probabilities(decide: Any) -> None:
    deciding = Written(lambda net, x: decide(net.fc(x)), fc=nn.Linear(4, 3))
    run = hookscope.activations(deciding, torch.ones(2, 4), multi_label=True)
    assert run.predictions == ()
