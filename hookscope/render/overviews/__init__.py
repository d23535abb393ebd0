"""One picture for each command that runs a model, dark on white: what a person would show to others."""
