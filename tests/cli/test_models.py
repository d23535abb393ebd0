import pytest
import torchvision

from tests.cli.conftest import Run


def test_every_torchvision_network_and_the_demo_are_listed_one_per_line(run: Run) -> None:
    ended = run("models")
    assert ended.code == 0
    assert ended.stdout.splitlines() == ["demo", *torchvision.models.list_models()]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("r3d", ["r3d_18"]),
        ("R3D", ["r3d_18"]),
        ("resnet??", ["resnet18", "resnet34", "resnet50"]),
        ("vit_?_16", ["vit_b_16", "vit_l_16"]),
        ("demo", ["demo"]),
    ],
)
def test_a_pattern_is_a_part_of_a_name_or_a_glob_over_the_whole(run: Run, pattern: str, expected: list[str]) -> None:
    ended = run("models", pattern)
    assert (ended.code, ended.stdout.splitlines(), ended.stderr) == (0, expected, "")


def test_every_listed_name_is_a_model(run: Run) -> None:
    from hookscope.models import parse_model

    for name in run("models").stdout.split():
        assert parse_model(name).form == ("demo" if name == "demo" else "torchvision")


def test_a_pattern_that_matches_nothing_names_the_nearest(run: Run) -> None:
    ended = run("models", "resnt34")
    assert ended.code == 5
    assert ended.stdout == ""
    assert len(ended.errors) == len(ended.stderr.splitlines()) == 1
    assert "'resnt34'" in ended.stderr
    assert "'resnet34'" in ended.stderr
