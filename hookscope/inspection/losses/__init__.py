"""Turn what a network returned into the one number to differentiate."""

from hookscope.inspection.losses.choosing import Loss, LossValue, choose_loss, output_at
from hookscope.inspection.losses.formulas import LOSSES
from hookscope.inspection.losses.targets import Output

__all__ = ["LOSSES", "Loss", "LossValue", "Output", "choose_loss", "output_at"]
