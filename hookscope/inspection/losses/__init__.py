"""Turn what a network returned into the one number to differentiate."""

from hookscope.inspection.losses.choosing import Loss, LossValue, choose_loss, main_output, output_at
from hookscope.inspection.losses.formulas import LOSSES, are_probabilities, class_probabilities, is_softmax, real
from hookscope.inspection.losses.targets import Output, class_index, required_class

__all__ = [
    "LOSSES",
    "Loss",
    "LossValue",
    "Output",
    "are_probabilities",
    "choose_loss",
    "class_index",
    "class_probabilities",
    "is_softmax",
    "main_output",
    "output_at",
    "real",
    "required_class",
]
