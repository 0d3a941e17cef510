"""Run unmodified megatron-core on CPU and gloo: an import hook scoped to `megatron.core`.

Megatron-core names CUDA in about sixty places (`device="cuda"`, `torch.cuda.current_device()`,
comparisons with `"torch.cuda.FloatTensor"`). On a machine without CUDA the hook rewrites those
words in the source text while `megatron.core` is imported. Torch itself stays untouched, so
everything else in the process (vLLM above all) sees the torch it expects, and no operator pays
for a Python-level dispatch mode. Line numbers stay true; rewritten code is never written to disk.

Besides the general rules there are a few `FIXES` for single statements. Each must either be
cured upstream or apply exactly once: a megatron-core that matches neither way is refused with
the name of the file, instead of training subtly wrong.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass

import torch

PACKAGE = "megatron.core"
NAMESPACE = "_cpu_cuda"
"""What `torch.cuda` is called in rewritten modules."""


class _Stream:
    """A CUDA stream or event where everything is already in order."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def record_event(self, *args: object) -> _Stream:
        return _Stream()

    def _nothing(self, *args: object, **kwargs: object) -> None: ...

    wait_stream = wait_event = synchronize = wait = record = query = _nothing


class _Generators:
    """`torch.cuda.default_generators` of a machine whose only device is the CPU."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator


class _CpuCuda(types.ModuleType):
    """The part of `torch.cuda` that Megatron-core calls, on CPU; the rest is `torch.cuda`'s."""

    Stream = Event = _Stream

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cuda, name)


def _nothing(*args: object, **kwargs: object) -> None: ...


def _zero(*args: object, **kwargs: object) -> int:
    return 0


def _cpu_namespace() -> _CpuCuda:
    def get_rng_state(*args: object, **kwargs: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, *args: object, **kwargs: object) -> None:
        torch.set_rng_state(state)

    replacements: dict[str, object] = {
        "current_device": lambda: torch.device("cpu"),
        "device_count": lambda: 1,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": _Stream,
        "default_stream": _Stream,
        "default_generators": _Generators(),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": torch.manual_seed,
        "random": types.SimpleNamespace(get_rng_state=get_rng_state, set_rng_state=set_rng_state),
        "nvtx": types.SimpleNamespace(range_push=_nothing, range_pop=_nothing),
        "memory_stats": lambda *args: {},
    }
    replacements |= dict.fromkeys(
        ("synchronize", "set_device", "empty_cache", "set_stream"), _nothing
    )
    replacements |= dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved"), _zero
    )
    namespace = _CpuCuda(NAMESPACE)
    for name, value in replacements.items():
        setattr(namespace, name, value)
    return namespace


RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    # Tensor.type() comparisons in the optimizers
    (re.compile(r"torch\.cuda\.(Float|Half|BFloat16|Int|Long)Tensor"), r"torch.\1Tensor"),
    (re.compile(r"(?<!import )(?<!from )\btorch\.cuda\."), f"{NAMESPACE}."),
    (re.compile(r"""(["'])cuda\1"""), r"\1cpu\1"),
    (
        re.compile(rf"\.cuda\(\s*(?:non_blocking=True|{NAMESPACE}\.current_device\(\))?\s*\)"),
        ".cpu()",
    ),
    (re.compile(r"pin_memory=True"), "pin_memory=False"),
)


@dataclass(frozen=True, slots=True)
class Fix:
    """One statement of one file that needs more than a renamed device."""

    file: str
    """Path below megatron/core."""
    old: str
    new: str
    """Same number of lines as `old`."""
    reason: str
    cured_by: str | None = None
    """Text whose presence shows that this megatron-core no longer needs the fix."""


FIXES: tuple[Fix, ...] = (
    Fix(
        file="tensor_parallel/random.py",
        old="from torch.cuda import _lazy_call, _lazy_init\n",
        new="_lazy_call = (lambda call: call()); _lazy_init = (lambda: None)\n",
        reason="random states are set lazily, once CUDA is initialised: never, on CPU",
    ),
    Fix(
        file="transformer/moe/moe_utils.py",
        old="except ImportError:\n    HAVE_TE = False\n",
        new="except ImportError:\n    HAVE_TE = False; te_general_gemm = None\n",
        reason="without Transformer Engine the router reads an undefined te_general_gemm",
        cured_by="(None, None, None, None, None, None, None, None, None, None)",
    ),
    Fix(
        file="transformer/moe/moe_utils.py",
        old="if torch.is_tensor(tensor) and tensor.is_cuda:",
        new="if torch.is_tensor(tensor):",
        reason="all-to-all split sizes must become a list; only CUDA tensors did",
    ),
    Fix(
        file="optimizer/distrib_optimizer.py",
        old="dst_tensors[key].copy_(tensors[key])",
        new="if key in tensors: dst_tensors[key].copy_(tensors[key])",
        reason="torch's Adam keeps a `step` that a fully reshardable checkpoint does not hold",
        cured_by="if not isinstance(tensors[key], torch.Tensor):",
    ),
)


def rewrite(source: str, file: str, version: str) -> str:
    """Source text of one megatron-core file, ready for a machine without CUDA.

    Args:
        file: path of the module below megatron/core, with forward slashes.
        version: of megatron-core, for the error.

    Raises:
        RuntimeError: a fix for this file neither applies exactly once nor is cured upstream.
    """
    for fix in FIXES:
        if fix.file != file or (fix.cured_by is not None and fix.cured_by in source):
            continue
        matches = source.count(fix.old)
        if matches != 1:
            raise RuntimeError(
                f"megatron-core {version}, {file}: {fix.old!r} occurs {matches} times, expected "
                f"once ({fix.reason}). This megatron-core cannot be trusted on CPU: install "
                "0.16.1 (Python 3.11) or 0.19.2 (Python 3.12), or adapt "
                "megatron_dapo.device.cpu_shim.FIXES."
            )
        source = source.replace(fix.old, fix.new)
    for pattern, replacement in RULES:
        source = pattern.sub(replacement, source)
    return source


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a rewritten module; overriding get_code keeps it out of __pycache__."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        file = path.replace("\\", "/").rpartition("megatron/core/")[2]
        source = rewrite(self.get_data(path).decode(), file, megatron_version())
        return compile(source, path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__[NAMESPACE] = _cpu_namespace()
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Hands modules of `megatron.core`, and only those, to `_Loader`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def megatron_version() -> str:
    """Version of the installed megatron-core, read without importing it."""
    return importlib.metadata.version("megatron-core")


def install_cpu_support() -> None:
    """Make `import megatron.core` work without CUDA; nothing happens where CUDA is available.

    Every module that imports megatron calls this first; calling it again changes nothing.

    Raises:
        RuntimeError: megatron.core was imported before, so it still speaks CUDA.
    """
    if torch.cuda.is_available() or any(isinstance(hook, _Finder) for hook in sys.meta_path):
        return
    if PACKAGE in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before megatron_dapo.device.install_cpu_support(): call "
            "it first, in the module that imports megatron."
        )
    sys.meta_path.insert(0, _Finder())
