"""Check checkpoints: load, run, judge, and keep evidence of what failed."""

from hookscope.checking.checkpoint import check, check_checkpoint

__all__ = ["check", "check_checkpoint"]
