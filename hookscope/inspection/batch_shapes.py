"""The shape of a tensor over all batches of a run: 60 inputs in batches of 8 are 60x…, not 8x…."""

from collections.abc import Sequence
from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass(slots=True)
class BatchShapes:
    """The shapes of a tensor in the batches of a run, each with the number of inputs in the batch."""

    seen: dict[tuple[int, Shape], int] = field(default_factory=dict)
    batch_count: int = 0

    def add(self, count: int, shape: Sequence[int], times: int = 1) -> None:
        """Count the shape in `times` batches of `count` inputs."""
        key = count, tuple(shape)
        self.seen[key] = self.seen.get(key, 0) + times
        self.batch_count += times

    def merge(self, other: "BatchShapes") -> None:
        """Add the batches of another."""
        for (count, shape), times in other.seen.items():
            self.add(count, shape, times)

    @property
    def whole(self) -> Shape:
        """The shape of all batches together along the axis that counts inputs; without one, that of the first batch."""
        axis = self.batch_axis if self.batch_count > 1 else None
        if axis is None:
            return next(iter(self.seen))[1]
        whole = [*self._shapes()[0][1]]
        whole[axis] = sum(shape[axis] * times for (_, shape), times in self.seen.items())
        return tuple(whole)

    @property
    def varies(self) -> bool:
        """Whether the shape differs between batches in more than how many inputs there are."""
        return len(self.seen) > 1 and len({shape for _, shape in self.seen}) > 1 and self.batch_axis is None

    def _shapes(self) -> list[tuple[int, Shape]]:
        """Return counts and shapes; an axis that is ragged (-1) in one batch is so in all."""
        ragged = {axis for _, shape in self.seen for axis, size in enumerate(shape) if size < 0}
        return [
            (count, tuple(-1 if axis in ragged else size for axis, size in enumerate(shape)))
            for count, shape in self.seen
        ]

    @property
    def batch_axis(self) -> int | None:
        """The axis that counts inputs, as far as the shapes show it.

        It is the only axis along which the batches differ: axis 0, or an axis whose size is in proportion to the number
        of inputs. If all batches are alike, it is axis 0, or axis 1 of (T, N, D), if its size is the number of inputs;
        a tensor that does not depend on the inputs may have that size by chance.
        """
        seen = self._shapes()
        shapes = [shape for _, shape in seen]
        first_count, first = seen[0]
        if any(len(shape) != len(first) for shape in shapes):
            return None
        differ = [axis for axis, size in enumerate(first) if any(shape[axis] != size for shape in shapes)]
        if len(differ) == 1:
            axis = differ[0]
            in_proportion = all(shape[axis] * first_count == first[axis] * count for count, shape in seen)
            return axis if axis == 0 or in_proportion else None
        if differ or len({count for count, _ in self.seen}) > 1:
            return None
        if first and first[0] == first_count:
            return 0
        return 1 if len(first) == 3 and first[1] == first_count else None
