"""One row given for several inputs is repeated for each of them: what depends on it alone has been seen once."""

import pytest
import torch
from torch import Tensor, nn

import hookscope
from tests.networks import Written

SHARED = "All 120 inputs share the same meta: layers computed from meta alone have seen 1 input, not 120."


class PictureAndMeta(nn.Module):
    """Adds features of a picture to those of a row of numbers, of which it takes the last three."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 8, 3)
            self.meta = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU())
            self.head = nn.Linear(8, 5)
        with torch.no_grad():  # positive for no row of small numbers
            self.meta[1].bias.fill_(-20)

    def forward(self, image: Tensor, meta: Tensor) -> Tensor:
        of_image = self.conv(image).relu().mean((2, 3))
        return self.head(of_image + self.meta(meta[:, 1:]))


def trained() -> PictureAndMeta:
    """Return it with the statistics of many rows, as training leaves them."""
    network = PictureAndMeta().train()
    with torch.no_grad():
        for _ in range(100):
            network(torch.zeros(64, 3, 8, 8), torch.randn(64, 4))
    return network.eval()


@pytest.fixture(scope="module")
def network() -> PictureAndMeta:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return trained()


@pytest.fixture(scope="module")
def pictures() -> Tensor:
    return torch.rand(120, 3, 8, 8, generator=torch.Generator().manual_seed(2))


ROW = torch.tensor([[0.3, -0.1, 0.4, -0.2]])


def test_the_runs_say_that_all_inputs_share_it(network: PictureAndMeta, pictures: Tensor) -> None:
    named = {"meta": ROW}
    assert SHARED in hookscope.activations(network, pictures, input=named).notes
    assert SHARED in hookscope.grads(network, pictures, input=named, loss="sum").notes
    assert SHARED in hookscope.survey(network, {"image": pictures, "meta": ROW}).notes
    assert SHARED in hookscope.check(network, images=pictures, input=named).warnings
    rows = ROW.repeat(120, 1)
    assert not hookscope.activations(network, pictures, input={"meta": rows}).notes
    assert not hookscope.activations(network, pictures[:1], input=named).notes


def test_an_argument_with_an_apostrophe_is_named_whole() -> None:
    model = Written(lambda net, x, **scores: net.linear(x) + sum(scores.values()), linear=nn.Linear(3, 3))
    [note] = hookscope.activations(model, {"x": torch.rand(2, 3), "referee's": torch.rand(1, 3)}).notes
    assert note.startswith("All 2 inputs share the same referee's: layers computed from referee's alone")


def test_zeros_of_one_row_are_no_finding_about_all_inputs(network: PictureAndMeta, pictures: Tensor) -> None:
    select = ["dead-channels", "constant-activation", "batchnorm-statistics"]
    rows = torch.randn(120, 4, generator=torch.Generator().manual_seed(3))
    actual = hookscope.check(network, images=pictures, input={"meta": rows}, select=select).findings
    assert {finding.rule for finding in actual} == {"constant-activation"}
    assert all("over all 120 inputs" in finding.message for finding in actual)
    assert hookscope.check(network, images=pictures, input={"meta": ROW}, select=select).findings == ()
    assert hookscope.activations(network, pictures, input={"meta": rows}).verdicts
    assert hookscope.activations(network, pictures, input={"meta": ROW}).verdicts == ()
