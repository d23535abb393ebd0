"""One picture for each command that runs a model, dark on white, fit to be shown to others."""
