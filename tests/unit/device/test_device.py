"""Which device this process computes on."""

from __future__ import annotations

import pytest
import torch

from megatron_dapo import device

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")


@without_cuda
def test_without_cuda_everything_is_the_cpu() -> None:
    assert device.select("auto", local_rank=3) == torch.device("cpu")
    assert device.select("cpu", local_rank=0) == device.current() == torch.device("cpu")
    assert device.backend() == "gloo"
    assert not device.has_transformer_engine() and not device.has_fp8()


@without_cuda
def test_asking_for_cuda_without_one_is_refused() -> None:
    with pytest.raises(ValueError, match="device=cuda"):
        device.select("cuda", local_rank=0)


def test_asking_for_the_cpu_while_cuda_is_visible_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        device.select("cpu", local_rank=0)
    with pytest.raises(ValueError, match="local rank 2"):
        device.select("auto", local_rank=2)
