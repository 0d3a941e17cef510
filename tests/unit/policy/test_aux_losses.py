"""What a Megatron release multiplies an auxiliary loss by; the gradients are tested on ranks."""

from __future__ import annotations

import pytest

from megatron_dapo.policy import aux_losses


@pytest.mark.parametrize(
    ("release", "factor"), [((0, 16, 1), 12), ((0, 18, 2), 12), ((0, 19, 0), 48), ((0, 19, 2), 48)]
)
def test_from_0_19_on_megatron_multiplies_by_the_tokens_of_all_parts(
    release: tuple[int, ...], factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aux_losses, "megatron_release", lambda: release)
    assert aux_losses.megatron_factor(routed=12, parts=4) == factor
