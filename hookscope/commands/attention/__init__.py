"""What attention looks at: weights seen as they are computed, reduced to numbers and maps."""
