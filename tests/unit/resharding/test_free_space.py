"""A directory that cannot hold the published weights is refused before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

from megatron_dapo.resharding.engine_layout import EngineLayout
from megatron_dapo.resharding.free_space import check_free_space
from megatron_dapo.resharding.name_map import family_for
from megatron_dapo.resharding.plan import TrainLayout, build_plan


def test_two_versions_must_fit_and_replicas_share_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 128}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    family = family_for(transformers.AutoConfig.for_model("qwen2", **sizes | heads))
    engine = EngineLayout(replicas=3, dtype="float32")
    plan = build_plan(TrainLayout(padded_vocab_size=128), engine, family, bucket_bytes=10**6)
    version = plan.bytes_by_receiver()[0]
    free = 2 * version

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    check_free_space(tmp_path, plan)
    free -= 1
    with pytest.raises(ValueError, match=f"transport=files: {tmp_path} has .* 2 versions of the"):
        check_free_space(tmp_path, plan)
