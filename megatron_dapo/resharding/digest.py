"""A 64-bit digest of a parameter that several ranks can compute together.

The digest of a matrix is a sum over its words, so that the digests of disjoint boxes add up to
the digest of the whole: each sender digests the slices that it sends, one integer sum over the
senders gives what the receiver must find.

    digest = sum over words of mix(word) * row_factor(row) * column_factor(column)   mod 2**64

`mix` is a bijection and the factors are odd, therefore invertible: a change of one word, however
small, always changes the digest. Without `mix` the highest bits of a word would count only modulo
a small power of two. Factors are pseudo-random (splitmix64), so exchanged rows, columns or words
and changes of several words go unnoticed with a probability of about 2**-32 at worst. It is a check
against faults, not against an attacker.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a word -> the dtype that a word is read as."""
CHUNK_WORDS = 32 * 1024
"""Words in flight: small enough for a processor's cache."""
CHUNK_WORDS_CUDA = 4 * 2**20
"""On a GPU: its kernels run longer than they take to launch, and scratch is 64 MiB at most."""

_ROW_SEED = 0x243F6A8885A308D3
_COLUMN_SEED = 0x13198A2E03707344
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_SPREAD = 0x2545F4914F6CDD1D


def as_matrix(tensor: Tensor) -> Tensor:
    """`tensor` as a matrix, without a copy: [n] -> [n, 1], [..., x, y] -> [... * x, y]."""
    return tensor.view(-1, 1) if tensor.dim() == 1 else tensor.view(-1, tensor.shape[-1])


def parameter_digest(parameter: Tensor, *, word_bytes: int) -> Tensor:
    """Digest of a whole parameter; int64 [], on the parameter's device. No gradient.

    Args:
        parameter: [n] or [..., x, y], any dtype, contiguous.
        word_bytes: 1, 2, 4 or 8; a divisor of the bytes of a row of the matrix.
    """
    return box_digest(as_matrix(parameter), row=0, col=0, word_bytes=word_bytes)


@torch.no_grad()
def box_digest(values: Tensor, *, row: int, col: int, word_bytes: int) -> Tensor:
    """Part of a parameter's digest that one box of it contributes; int64 [], on its device.

    Args:
        values: [rows, columns] of any dtype; a slice of a larger matrix is read in place.
        row: row of the parameter's matrix that the box starts at.
        col: its first column, in elements.
        word_bytes: 1, 2, 4 or 8; divides the bytes before the box and the bytes in it of a row.

    Raises:
        ValueError: the box does not consist of whole words.
    """
    element = values.element_size()
    row_bytes, col_bytes = values.shape[1] * element, col * element
    if word_bytes not in WORDS or col_bytes % word_bytes or row_bytes % word_bytes:
        raise ValueError(
            f"a box of {values.shape[1]} columns of {values.dtype} from column {col} on does not "
            f"consist of words of {word_bytes} bytes; use 1, 2, 4 or 8 bytes that divide both"
        )
    rows, words, device = values.shape[0], row_bytes // word_bytes, values.device
    row_factors = _factors(_ROW_SEED, row, rows, device)
    column_factors = _factors(_COLUMN_SEED, col_bytes // word_bytes, words, device)
    raw = (values if values.stride(1) == 1 else values.contiguous()).view(torch.uint8)
    limit = CHUNK_WORDS_CUDA if values.is_cuda else CHUNK_WORDS
    width = max(min(words, limit), 1)
    height = max(min(limit // width, rows), 1)
    scratch = torch.empty(2, height * width, dtype=torch.int64, device=device)
    sums = torch.zeros(words, dtype=torch.int64, device=device)
    for left in range(0, words, width):
        right = min(left + width, words)
        for top in range(0, rows, height):
            bottom = min(top + height, rows)
            chunk = _words(raw[top:bottom, left * word_bytes : right * word_bytes], word_bytes)
            mixed, spare = scratch[:, : chunk.numel()].view(2, *chunk.shape).unbind()
            _mix(chunk, out=mixed, scratch=spare)
            _add_weighted_rows(sums[left:right], mixed, row_factors[top:bottom])
    return (sums * column_factors).sum()


def as_hex(digest: int) -> str:
    """16 hexadecimal digits of a digest, signed or not."""
    return f"{digest % 2**64:016x}"


def _words(raw: Tensor, word_bytes: int) -> Tensor:
    """Bytes [rows, bytes] as words [rows, words]; copied only where they are not aligned."""
    if raw.storage_offset() % word_bytes or raw.stride(0) % word_bytes:
        raw = raw.clone()
    return raw.view(WORDS[word_bytes])


def _mix(words: Tensor, *, out: Tensor, scratch: Tensor) -> None:
    """x XOR (x shifted right by 32) with x = word * an odd number: every bit reaches lower ones."""
    torch.mul(words if words.dtype == torch.int64 else words.to(torch.int64), _SPREAD, out=out)
    torch.bitwise_right_shift(out, 32, out=scratch)
    scratch &= 2**32 - 1
    out ^= scratch


def _add_weighted_rows(sums: Tensor, matrix: Tensor, factors: Tensor) -> None:
    """sums[column] += sum over rows of matrix[row, column] * factors[row]."""
    if matrix.is_cuda:  # which multiplies no integer matrices
        sums += matrix.mul_(factors[:, None]).sum(0)
    else:
        sums.addmv_(matrix.t(), factors)


def _factors(seed: int, first: int, count: int, device: torch.device) -> Tensor:
    """`count` odd pseudo-random integers from place `first` on; int64 [count]."""
    place = torch.arange(first, first + count, dtype=torch.int64, device=device)
    state = place * _signed(_STEP) + _signed(seed)
    state = (state ^ _shifted_right(state, 30)) * _signed(_FIRST)
    state = (state ^ _shifted_right(state, 27)) * _signed(_SECOND)
    return (state ^ _shifted_right(state, 31)) | 1


def _shifted_right(values: Tensor, bits: int) -> Tensor:
    """Logical shift, which int64 does not have."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit integer."""
    return value - 2**64 if value >= 2**63 else value
