"""Every command of the README runs as it stands there, in a fresh clone and offline."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet34

from tests.docs.pages import ROOT
from tests.docs.test_pages import Terminal
from tests.fork_server import ForkServer

# Commands of the tables and sentences, in order: the training writes the checkpoints of those below it.
COMMANDS = re.findall(r"`(hookscope (?!check --rules)[^`\n]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
LEADING = COMMANDS[:5]


@pytest.fixture(scope="module")
def clone(
    tmp_path_factory: pytest.TempPathFactory, docs_environment: dict[str, str], fork_server: ForkServer
) -> Terminal:
    """A folder with what the README's commands name, and what its first five write."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("sample_images", "configs", "docs"):
        (folder / name).symlink_to(ROOT / name)
    terminal = Terminal(folder, docs_environment, fork_server)
    for command in LEADING:
        printed = terminal.run(command)
        assert terminal.code == 0, printed[0]
    return terminal


def test_the_first_five_run_and_the_fifth_compares_what_the_fourth_trained(clone: Terminal) -> None:
    assert [command.split()[1] for command in LEADING] == ["activations", "attribute", "grads", "watch", "diff"]
    runs = {path.name for path in (clone.folder / "hookscope-runs").iterdir()}
    expected = {"activations-demo-cat", "attribute-demo-cat", "diff-epoch_1.pt-epoch_3.pt-sample_images", "latest"}
    assert expected <= runs
    assert sorted(path.name for path in (clone.folder / "checkpoints").iterdir()) == [
        "epoch_1.pt",
        "epoch_2.pt",
        "epoch_3.pt",
    ]
    assert (clone.folder / "hookscope-runs" / "latest" / "diff.csv").is_file()


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", COMMANDS[5:])
def test_the_others_run(command: str, clone: Terminal) -> None:
    printed = clone.run(command)
    assert clone.code == 0, printed[0]


def test_the_index_asks_what_the_readme_asks() -> None:
    readme, index = (
        re.findall(r"^\| \[([^]]+)\]\(.+\) \| `([^`]+)`", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        for page in ("README.md", "docs/index.md")
    )
    assert index == readme


def test_the_packages_cat_is_that_of_the_samples() -> None:
    assert Path(ROOT, "hookscope/inputs/cat.jpg").read_bytes() == Path(ROOT, "sample_images/cat.jpg").read_bytes()


def test_the_readme_fits_on_two_screens() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 120


def test_hooks_by_hand_keep_33_of_116_outputs_of_resnet34_that_a_relu_overwrites() -> None:
    network = resnet34(weights=None).eval()
    kept: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
            kept[name] = (output, output.clone())

        return hook

    modules = dict(network.named_modules())
    for name, module in modules.items():
        module.register_forward_hook(keep(name))
    with torch.inference_mode():
        network(torch.rand(1, 3, 64, 64))
    changed = [name for name, (reference, copy) in kept.items() if not torch.equal(reference, copy)]
    assert (len(changed), len(modules)) == (33, 116)
    assert "33 of 116 modules" in (ROOT / "README.md").read_text(encoding="utf-8").replace("\n  ", " ")
