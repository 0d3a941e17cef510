"""Buckets: what is under way at a time. Runs of rows of the model in the order of the family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Buckets:
    """Rows of all parameters, cut into runs of at most `bucket_bytes`; one step at least.

    Args:
        rows: of each parameter, its Hugging Face tensors stacked.
        steps: of each parameter, rows that stay together; a divisor of its rows.
        step_bytes: of each parameter, bytes of so many rows.
    """

    def __init__(
        self,
        rows: Sequence[int],
        steps: Sequence[int],
        step_bytes: Sequence[int],
        bucket_bytes: int,
    ) -> None:
        self.largest_bytes = 0
        """Of the fullest bucket: more than `bucket_bytes` where one step is."""
        self._rows = rows
        self._starts: list[tuple[int, int]] = []
        filled = bucket_bytes  # the first row opens the first bucket
        for number, (count, rows_of_step, size) in enumerate(
            zip(rows, steps, step_bytes, strict=True)
        ):
            step = 0
            while step < count // rows_of_step:
                fitting = (bucket_bytes - filled) // size
                if fitting <= 0:
                    self._starts.append((number, step * rows_of_step))
                    filled, fitting = 0, max(1, bucket_bytes // size)
                taken = min(fitting, count // rows_of_step - step)
                filled += taken * size
                step += taken
                self.largest_bytes = max(self.largest_bytes, filled)

    def __len__(self) -> int:
        return len(self._starts)

    def runs(self, bucket: int) -> Iterator[tuple[int, int, int]]:
        """(parameter, first row, row after the last) of everything in a bucket, in order."""
        number, row = self._starts[bucket]
        last = bucket + 1 == len(self._starts)
        stop, stop_row = (len(self._rows), 0) if last else self._starts[bucket + 1]
        while (number, row) < (stop, stop_row):
            end = stop_row if number == stop else self._rows[number]
            yield number, row, end
            number, row = number + 1, 0
