"""Results as HTML pages, each one file."""
