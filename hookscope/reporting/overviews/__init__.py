"""One picture for each command that runs a model, fit to be shown to others on light and dark pages."""
