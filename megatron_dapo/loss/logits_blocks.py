"""Logits that exist already, in blocks of rows; their gradient takes their place."""

from __future__ import annotations

from torch import Tensor

from megatron_dapo.loss.shards import check_chunk_tokens, default_rows

BLOCKS_AT_ONCE = 64
"""Cache blocks that share one merge of statistics and one coefficient step."""


class LogitsBlocks:
    """Logits that are there already; their gradient takes their place."""

    def __init__(self, logits: Tensor, targets: Tensor, chunk_tokens: int | None) -> None:
        check_logits(logits, targets)
        self._logits = logits.detach()
        self._rows = check_chunk_tokens(chunk_tokens) or BLOCKS_AT_ONCE * default_rows(logits)
        self._learns = False

    def blocks(self) -> list[slice]:
        total = self._logits.shape[0]
        return [slice(i, min(i + self._rows, total)) for i in range(0, max(total, 1), self._rows)]

    def logits(self, rows: slice) -> Tensor:
        return self._logits[rows]

    def start_gradient(
        self, *, hidden: bool, weight: bool, accumulator: Tensor | None = None
    ) -> None:
        self._learns = hidden
        if hidden and not rows_are_apart(self._logits):
            self._logits = self._logits.clone()

    def gradient_of(self, rows: slice, logits: Tensor) -> Tensor:
        """Where d loss / d logits of a block goes: the logits' own memory."""
        return logits

    def add_gradient(self, rows: slice, grad_logits: Tensor, active: Tensor) -> None:
        """Nothing to do: `grad_logits` is the logits' own memory."""

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        return (self._logits if self._learns else None), None


def check_logits(logits: Tensor, targets: Tensor) -> None:
    """Raises ValueError unless logits are float [tokens, vocab / tp] with a label for each row."""
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)}: need "
            "[tokens, vocab / tp] and [tokens]; flatten [seq, batch] first"
        )
    if not logits.is_floating_point():
        raise ValueError(f"logits are {logits.dtype}: need a floating-point dtype")


def rows_are_apart(logits: Tensor) -> bool:
    """False for expanded or overlapping rows, which must not be overwritten."""
    return logits.stride(1) == 1 and logits.stride(0) >= logits.shape[1]
