"""Shapes of a run are those of all its inputs, however they were cut into batches."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.inspection.batch_shapes import BatchShapes, Shape
from tests.networks import Written, outputs_of


def shapes_of(*batches: tuple[int, Shape]) -> BatchShapes:
    shapes = BatchShapes()
    for count, shape in batches:
        shapes.add(count, shape)
    return shapes


@pytest.mark.parametrize(
    ("batches", "whole", "varies"),
    [
        ([(8, (8, 3))] * 7 + [(4, (4, 3))], (60, 3), False),
        ([(8, (512, 49, 96))] * 7 + [(4, (256, 49, 96))], (3840, 49, 96), False),  # 64 windows of each input
        ([(8, (5, 8, 6)), (3, (5, 3, 6))], (5, 11, 6), False),  # (T, N, D)
        ([(8, (5, 8, 6)), (8, (5, 8, 6))], (5, 16, 6), False),
        ([(8, (1, 8, 6)), (8, (1, 8, 6))], (1, 16, 6), False),  # the last state of a recurrent layer
        ([(8, (7, 6)), (3, (7, 6))], (7, 6), False),  # no axis counts inputs
        ([(8, (8, 6)), (3, (8, 6))], (8, 6), False),  # nor here, though the first batch is as long
        ([(8, (512, 4)), (8, (498, 4))], (1010, 4), False),  # as many as each batch has
        ([(1, (1, 3, 9, 9)), (1, (1, 3, 9, 7))], (1, 3, 9, 9), True),
        ([(8, (8, 3, 9)), (4, (4, 3, 7))], (8, 3, 9), True),
        ([(2, (2, 3, 5)), (2, (2, -1, 5)), (1, (1, 4, 5))], (5, -1, 5), False),  # parts of one length in two batches
    ],
)
def test_shapes_are_added_along_the_axis_that_counts_inputs(
    batches: Sequence[tuple[int, Shape]], whole: Shape, varies: bool
) -> None:
    shapes = shapes_of(*batches)
    assert (shapes.whole, shapes.varies, shapes.batch_count) == (whole, varies, len(batches))


def mixed(net: Any, x: Tensor) -> Tensor:  # (N, T, 2)
    """Give rows for each input, time first, and a table that does not depend on the input."""
    table = net.table(torch.ones(7, 2))  # (7, 3)
    turned = net.turned(x.transpose(0, 1)).transpose(0, 1)  # (T, N, 3) inside
    return net.line(x) + turned + table.sum(0)


@pytest.mark.parametrize("batch_size", [8, 6, 20])
def test_rows_of_a_run_in_batches_have_the_shape_of_one_batch(batch_size: int) -> None:
    torch.manual_seed(0)
    parts = {name: nn.Linear(2, 3) for name in ("table", "line", "turned")}
    model, inputs = Written(mixed, **parts, none=nn.Identity()).eval(), torch.randn(20, 5, 2)
    outputs = outputs_of(model, inputs)
    whole = {name: tuple(output.shape) for name, output in outputs.items()}
    assert whole == {"table": (7, 3), "line": (20, 5, 3), "turned": (5, 20, 3), "": (20, 5, 3)}
    run = hookscope.activations(model, inputs, batch_size=batch_size, layer="*", save_tensors=True)
    assert {row.layer: row.shape for row in run} == whole
    for name, label in (("line", "line"), ("turned", "turned"), ("", "(model)")):
        torch.testing.assert_close(run.tensors[label], outputs[name])
    assert not any("shape varies" in row.flags for row in run)
    gradients = hookscope.grads(model, inputs, batch_size=batch_size, loss="sum", layer="*", inputs=True)
    assert {row.layer: row.shape for row in gradients.gradients if row.role == "output"} == whole
    assert {row.layer: row.shape for row in gradients.rows} == whole
    compared = hookscope.diff(model, model, inputs, batch_size=batch_size, layer="*")
    assert {row.layer: row.shape for row in compared.rows} == whole
    assert [output.shape for output in compared.outputs] == [(20, 5, 3)]
