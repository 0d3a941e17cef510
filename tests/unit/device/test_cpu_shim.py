"""The import hook that runs megatron-core without CUDA."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from megatron_dapo.device import cpu_shim, install_cpu_support
from megatron_dapo.device.cpu_shim import FIXES, NAMESPACE, Fix, rewrite

SOURCES = Path(importlib.util.find_spec("megatron.core").submodule_search_locations[0])  # type: ignore[union-attr,index]
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the hook is for the CPU")


@pytest.mark.parametrize("fix", FIXES, ids=lambda fix: f"{fix.file}: {fix.reason[:30]}")
def test_each_fix_still_matches_the_installed_megatron_core(fix: Fix) -> None:
    source = (SOURCES / fix.file).read_text()
    version = cpu_shim.megatron_version()
    cured = fix.cured_by is not None and fix.cured_by in source
    assert cured or source.count(fix.old) == 1, (
        f"megatron-core {version}, {fix.file}: {fix.old!r} no longer occurs exactly once"
    )
    if version == "0.16.1":
        assert not cured, f"{fix.file}: `cured_by` matches a version that needs the fix"


def test_a_fix_that_stops_matching_names_file_and_version() -> None:
    with pytest.raises(RuntimeError, match=r"megatron-core 9\.9.*tensor_parallel/random\.py"):
        rewrite("import torch\n", "tensor_parallel/random.py", "9.9")


def test_a_fix_that_matches_twice_is_refused() -> None:
    twice = "if torch.is_tensor(tensor) and tensor.is_cuda:\n    pass\n" * 2
    source = "except ImportError:\n    HAVE_TE = False\n" + twice
    with pytest.raises(RuntimeError, match="occurs 2 times"):
        rewrite(source, "transformer/moe/moe_utils.py", "0.16.1")


def test_a_statement_cured_upstream_is_left_alone() -> None:
    cured = (
        "if not isinstance(tensors[key], torch.Tensor):\n    continue\n"
        "dst_tensors[key].copy_(tensors[key])\n"
    )
    assert rewrite(cured, "optimizer/distrib_optimizer.py", "0.19.2") == cured


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('torch.zeros([], device="cuda")', 'torch.zeros([], device="cpu")'),
        ("x = torch.cuda.current_device()", f"x = {NAMESPACE}.current_device()"),
        ("'torch.cuda.FloatTensor'", "'torch.FloatTensor'"),
        ("t.cuda(non_blocking=True)", "t.cpu()"),
        ("t.cuda()", "t.cpu()"),
        ("from torch.cuda.nvtx import range_pop", "from torch.cuda.nvtx import range_pop"),
        ("cuda_graph = is_cuda(cudagraph)", "cuda_graph = is_cuda(cudagraph)"),
    ],
)
def test_words_for_cuda_become_words_for_the_cpu(before: str, after: str) -> None:
    assert rewrite(before, "any.py", "0.16.1") == after


def test_line_numbers_of_tracebacks_stay_true() -> None:
    for path in SOURCES.rglob("*.py"):
        source = path.read_text()
        file = path.relative_to(SOURCES).as_posix()
        assert rewrite(source, file, "installed").count("\n") == source.count("\n"), file


@without_cuda
def test_torch_and_other_packages_are_untouched() -> None:
    code = (
        "import sys, torch, torch.cuda\n"
        "before = dict(vars(torch.cuda))\n"
        "tensor = dict(vars(torch.Tensor))\n"
        "from megatron_dapo.device import install_cpu_support\n"
        "install_cpu_support(); install_cpu_support()\n"
        "import megatron.core.tensor_parallel.random as rewritten\n"
        "assert all(vars(torch.cuda)[n] is v for n, v in before.items()), 'torch.cuda'\n"
        "assert all(vars(torch.Tensor)[n] is v for n, v in tensor.items()), 'torch.Tensor'\n"
        f"assert '{NAMESPACE}' in vars(rewritten), 'megatron.core was not rewritten'\n"
        f"others = [m for n, m in sys.modules.items() if not n.startswith('megatron.core')]\n"
        f"assert not any('{NAMESPACE}' in vars(m) for m in others if hasattr(m, '__dict__'))\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)


@without_cuda
def test_installing_after_megatron_was_imported_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hooks = [hook for hook in sys.meta_path if not isinstance(hook, cpu_shim._Finder)]
    monkeypatch.setattr(sys, "meta_path", hooks)
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    with pytest.raises(RuntimeError, match="call"):
        install_cpu_support()
    assert sys.meta_path == hooks
