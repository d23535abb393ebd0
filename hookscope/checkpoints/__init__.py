"""Read weights files of unknown origin without running code from them; `sandbox`: worker processes with limits."""
