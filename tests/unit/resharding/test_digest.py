"""The digest of a parameter: additive over boxes, and changed by every change."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_dapo.resharding import digest
from megatron_dapo.resharding.digest import as_hex, as_matrix, box_digest, parameter_digest

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8]
ALL = 2**64


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    width = columns * dtype.itemsize
    raw = torch.randint(0, 256, (rows, width), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def splitmix64(seed: int, place: int) -> int:
    state = (seed + place * 0x9E3779B97F4A7C15) % ALL
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % ALL
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % ALL
    return (state ^ (state >> 31)) | 1


def reference(values: Tensor, word_bytes: int, row: int = 0, col: int = 0) -> int:
    """The formula in the module's docstring with Python's integers."""
    raw = values.contiguous().view(torch.uint8).tolist()
    first = col * values.element_size() // word_bytes
    total = 0
    for r, line in enumerate(raw):
        for c in range(len(line) // word_bytes):
            text = bytes(line[c * word_bytes : (c + 1) * word_bytes])
            word = int.from_bytes(text, "little", signed=True) % ALL
            spread = word * 0x2545F4914F6CDD1D % ALL
            mixed = spread ^ (spread >> 32)
            row_factor = splitmix64(0x243F6A8885A308D3, row + r)
            total += mixed * row_factor * splitmix64(0x13198A2E03707344, first + c)
    return total % ALL


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("word_bytes", [1, 2, 4, 8])
def test_the_digest_is_the_formula_in_any_chunks(
    dtype: torch.dtype, word_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = matrix(11, 24, dtype)
    expected = reference(values, word_bytes)
    for chunk in (1, 7, 64 * 1024):
        monkeypatch.setattr(digest, "CHUNK_WORDS", chunk)
        assert parameter_digest(values, word_bytes=word_bytes).item() % ALL == expected
    col = 8
    box = box_digest(values[3:7, col:16], row=3, col=col, word_bytes=word_bytes).item()
    assert box % ALL == reference(values[3:7, col:16], word_bytes, row=3, col=col)


def test_the_way_for_gpus_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = matrix(50, 40, torch.bfloat16)

    def add(sums: Tensor, words: Tensor, factors: Tensor) -> None:
        sums += words.mul_(factors[:, None]).sum(0)

    expected = parameter_digest(values, word_bytes=8)
    monkeypatch.setattr(digest, "_add_weighted_rows", add)
    assert torch.equal(parameter_digest(values, word_bytes=8), expected)


def boxes(rows: range, columns: range, draw: random.Random) -> list[tuple[range, range]]:
    """A random partition of a matrix of words."""
    if len(rows) * len(columns) <= 1 or draw.random() < 0.15:
        return [(rows, columns)]
    if len(columns) == 1 or (len(rows) > 1 and draw.random() < 0.5):
        at = draw.randrange(1, len(rows))
        return boxes(rows[:at], columns, draw) + boxes(rows[at:], columns, draw)
    at = draw.randrange(1, len(columns))
    return boxes(rows, columns[:at], draw) + boxes(rows, columns[at:], draw)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 9),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 2, 4, 8]),
    st.randoms(use_true_random=False),
)
def test_digests_of_any_boxes_add_up(
    rows: int, words: int, dtype: torch.dtype, word_bytes: int, draw: random.Random
) -> None:
    elements = max(1, word_bytes // dtype.itemsize)
    values = matrix(rows, words * elements, dtype)
    total: int | float = 0
    for down, across in boxes(range(rows), range(words), draw):
        left, right = across.start * elements, across.stop * elements
        total += box_digest(
            values[down.start : down.stop, left:right],
            row=down.start,
            col=left,
            word_bytes=word_bytes,
        ).item()
    assert total % ALL == parameter_digest(values, word_bytes=word_bytes).item() % ALL


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("word_bytes", [4, 8])
def test_every_flipped_bit_is_seen(dtype: torch.dtype, word_bytes: int) -> None:
    values = matrix(5, 8, dtype)
    raw = values.view(torch.uint8)
    before = parameter_digest(values, word_bytes=word_bytes).item()
    for row in range(raw.shape[0]):
        for column in range(raw.shape[1]):
            for bit in range(8):
                raw[row, column] ^= 1 << bit
                assert parameter_digest(values, word_bytes=word_bytes).item() != before
                raw[row, column] ^= 1 << bit


def test_two_flipped_signs_are_seen() -> None:
    """The highest bits of two words: a plain weighted sum would lose them."""
    values = matrix(16, 16, torch.bfloat16)
    seen = {parameter_digest(values, word_bytes=8).item()}
    signs = [(row, column) for row in range(16) for column in range(3, 16, 4)]
    pairs = [(one, other) for one in signs for other in signs if one < other]
    for one, other in pairs:
        changed = values.clone()
        changed.view(torch.int16)[one] ^= -(2**15)
        changed.view(torch.int16)[other] ^= -(2**15)
        seen.add(parameter_digest(changed, word_bytes=8).item())
    assert len(seen) == len(pairs) + 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("word_bytes", [4, 8])
def test_one_bit_flipped_in_all_numbers_or_words_is_seen(
    dtype: torch.dtype, word_bytes: int
) -> None:
    """Negation, for one: the flipped bits of an even number of words must not cancel out."""
    values = matrix(12, 16, dtype)
    digests = {parameter_digest(values, word_bytes=word_bytes).item()}
    masks = {(1 << bit).to_bytes(8, "little") for bit in range(64)}
    for width in (1, 2, 4, 8):
        masks |= {(1 << bit).to_bytes(width, "little") * (8 // width) for bit in range(8 * width)}
    masks.add(b"\xff" * 8)
    for mask in masks:
        pattern = torch.tensor(list(mask), dtype=torch.uint8)
        raw = values.view(torch.uint8).view(12, -1, 8) ^ pattern
        digests.add(parameter_digest(raw.view(12, -1), word_bytes=word_bytes).item())
    assert len(digests) == len(masks) + 1


def test_exchanged_rows_columns_and_words_are_seen() -> None:
    values = matrix(12, 16, torch.float32)
    variants = [values]
    for one in range(12):
        for other in range(one):
            order = list(range(12))
            order[one], order[other] = other, one
            variants.append(values[order])
            variants.append(values[:, order + list(range(12, 16))])
    variants += [values.flip(0), values.flip(1), values.roll(1, 0), values.roll(2, 1), -values]
    digests = {parameter_digest(v.contiguous(), word_bytes=8).item() for v in variants}
    assert len(digests) == len(variants)


def test_the_place_of_a_box_counts() -> None:
    values = matrix(4, 8, torch.float32)
    places = [(0, 0), (1, 0), (0, 2), (4, 0), (0, 4)]
    assert len({box_digest(values, row=r, col=c, word_bytes=8).item() for r, c in places}) == 5


def test_slices_and_unaligned_bytes_are_read_in_place() -> None:
    flat = torch.randint(0, 256, (3 + 6 * 16,), dtype=torch.uint8)
    unaligned = flat[3:].view(6, 16)
    aligned = unaligned.clone()
    assert torch.equal(
        parameter_digest(unaligned, word_bytes=8), parameter_digest(aligned, word_bytes=8)
    )
    turned = aligned.t().contiguous().t()
    assert torch.equal(
        box_digest(turned, row=0, col=0, word_bytes=8), parameter_digest(aligned, word_bytes=8)
    )


def test_words_that_do_not_fit_are_refused() -> None:
    values = matrix(3, 6, torch.bfloat16)
    for col, word_bytes in ((0, 8), (1, 4), (0, 3), (0, 16)):
        with pytest.raises(ValueError, match="does not consist of words of"):
            box_digest(values, row=0, col=col, word_bytes=word_bytes)


def test_vectors_are_columns_and_experts_lie_below_each_other() -> None:
    assert as_matrix(torch.zeros(5)).shape == (5, 1)
    assert as_matrix(torch.zeros(5, 3)).shape == (5, 3)
    assert as_matrix(torch.zeros(4, 5, 3)).shape == (20, 3)
    assert as_matrix(torch.zeros(0)).shape == (0, 1)


def test_nothing_has_digest_zero_and_hexadecimal_is_unsigned() -> None:
    empty = torch.zeros(0, 4)
    assert box_digest(empty, row=3, col=0, word_bytes=8).item() == 0
    assert as_hex(-1) == "f" * 16
    assert as_hex(2**64 - 1) == "f" * 16
    assert as_hex(10) == "000000000000000a"


@pytest.mark.parametrize(
    ("rows", "most"), [(2048, 4 * 8 * digest.CHUNK_WORDS), (4, 4 * 4 * 2048)], ids=["large", "norm"]
)
def test_memory_beside_the_parameter_is_bounded(rows: int, most: int) -> None:
    """Factors of rows and columns, and a chunk or two; of a small parameter no whole chunk."""
    values = torch.zeros(rows, 1024, dtype=torch.bfloat16)
    with torch.profiler.profile(profile_memory=True) as profile:
        parameter_digest(values, word_bytes=8)
    sizes = [event.self_cpu_memory_usage for event in profile.key_averages()]
    assert max(sizes) < most
