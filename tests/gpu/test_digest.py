"""The digest of a parameter on a CUDA device: bit for bit that of the CPU, over several chunks."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo.resharding import digest
from megatron_dapo.resharding.digest import box_digest, parameter_digest


@pytest.mark.parametrize("word_bytes", [1, 2, 4, 8])
def test_cpu_and_gpu_agree(word_bytes: int) -> None:
    rows = 3 * digest.CHUNK_WORDS_CUDA * word_bytes // 2048 + 5
    values = torch.randn(rows, 1024).bfloat16()
    here = parameter_digest(values, word_bytes=word_bytes)
    there = parameter_digest(values.cuda(), word_bytes=word_bytes)
    assert there.item() == here.item()


def test_a_slice_is_read_in_place() -> None:
    values = torch.randn(64, 512).bfloat16()
    place = {"row": 8, "col": 128, "word_bytes": 8}
    box = box_digest(values.cuda()[8:40, 128:384], **place)
    assert box.item() == box_digest(values[8:40, 128:384], **place).item()
