"""Check that two ways did the same work before their times are compared."""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.findings import Work

Rows = Mapping[str, Sequence[float]]
"""By row label ("layer1.0.relu#1"): mean, std, min and max of the values, or their shape."""

Found = Rows | Callable[[], Rows]
"""What one run of a way gives: rows or, where it gives a result of its own kind, what tells the rows from it. The
telling is for the comparison alone, and not timed."""

# By device, relative to the largest absolute value of the row: float32 sums in another order stay far below
# the first, and CUDA's kernels through all layers below the second; a ReLU that overwrites an activation is far beyond.
TOLERANCES = {"cpu": 1e-4, "cuda": 2e-3}


def same_statistics(actual: Sequence[float], expected: Sequence[float], tolerance: float) -> bool:
    """Tell whether mean, std, min and max agree within `tolerance` of the expected values' largest."""
    allowed = tolerance * max(abs(expected[2]), abs(expected[3]))
    return all(abs(mine - theirs) <= allowed for mine, theirs in zip(actual, expected, strict=True))


def told(actual: Found) -> Rows:
    """Return the rows of what a way gives."""
    return actual() if callable(actual) else actual


def judge(actual: Found, expected: Rows, *, shapes_only: bool = False, tolerance: float = TOLERANCES["cpu"]) -> Work:
    """Compare what a way found with what is expected; rows that only the way has do not count.

    Args:
        actual: By the way.
        expected: Statistics, or with `shapes_only` shapes.
        shapes_only: The way computes nothing else.
        tolerance: See `TOLERANCES`.
    """
    rows = told(actual)
    both = [(rows[label], row) for label, row in expected.items() if label in rows]
    if shapes_only:
        wrong = sum(tuple(mine) != tuple(theirs) for mine, theirs in both)
    else:
        wrong = sum(not same_statistics(mine, theirs, tolerance) for mine, theirs in both)
    missing = len(expected) - len(both)
    if wrong or missing:
        return Work("differs", len(expected), wrong, missing)
    return Work("shapes only" if shapes_only else "same", len(expected))


def failed(error: Exception) -> Work:
    """Say of a way that it does not run, and why."""
    lines = str(error).strip().splitlines()
    sentence = (lines[0] if lines else "no message").split(". ")[0]
    return Work("does not run", reason=f"{type(error).__name__}: {sentence[:160]}")
