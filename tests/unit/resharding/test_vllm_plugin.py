"""Engine side of the weight transfer, as far as it needs no engine."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megatron_dapo.resharding import vllm_plugin
from megatron_dapo.resharding.vllm_plugin import PolicyEngine, register


def test_vllm_finds_the_plugin() -> None:
    (entry,) = (
        e for e in entry_points(group="vllm.general_plugins") if e.name == vllm_plugin.BACKEND
    )
    assert entry.load() is register


def test_registering_twice_is_harmless() -> None:
    register()
    register()
    engine = WeightTransferEngineFactory._registry[vllm_plugin.BACKEND]()
    assert engine is PolicyEngine


def test_the_package_does_not_import_vllm() -> None:
    code = (
        "import sys, importlib\n"
        "for name in ('types', 'config.schema', 'rollout.vllm_engine', 'rollout.vllm_server',"
        " 'rollout.sampler', 'resharding'):\n"
        "    importlib.import_module('megatron_dapo.' + name)\n"
        "assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "int8_per_token_head", "nvfp4"])
def test_a_cache_whose_scales_would_go_stale_is_refused(dtype: str) -> None:
    engine = PolicyEngine.__new__(PolicyEngine)
    engine.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=dtype))
    with pytest.raises(ValueError, match=f"KV cache as {dtype}, whose .*--kv-cache-dtype auto"):
        engine._check_cache()
    engine.vllm_config.cache_config.cache_dtype = "auto"
    engine._check_cache()
