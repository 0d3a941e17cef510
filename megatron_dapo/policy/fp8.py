"""FP8 recipes of Transformer Engine, as fields of Megatron's TransformerConfig.

Megatron-core runs `fp8=...` in full precision without a word where Transformer Engine is
missing, so what was asked for is checked here first.
"""

from __future__ import annotations

import torch

from megatron_dapo import device
from megatron_dapo.config.schema import PrecisionConfig

GPU_EXTRA = "pip install megatron_dapo[gpu]"
FIRST_BLACKWELL = (10, 0)


def check_fp8(precision: PrecisionConfig, *, dtype: str) -> None:
    """Refuse an FP8 recipe that this process would not really run.

    Args:
        precision: recipe and its options; `fp8="none"` passes everywhere.
        dtype: `model.dtype`; FP8 layers take and give BF16.

    Raises:
        ValueError: Transformer Engine or the chip is missing, or options contradict each other.
    """
    if precision.fp8 == "none":
        if precision.fp8_param_gather or precision.first_last_layers_bf16:
            raise ValueError(
                "precision.fp8_param_gather and first_last_layers_bf16 need an FP8 recipe; "
                "precision.fp8=none. Choose blockwise, tensorwise, delayed or mxfp8."
            )
        return
    _check_options(precision, dtype)
    asked = f"precision.fp8={precision.fp8}"
    if not device.has_transformer_engine():
        raise ValueError(
            f"{asked}: needs Transformer Engine on a CUDA device, and there is none here; "
            f"Megatron would silently train in {dtype}. Install it ({GPU_EXTRA}) or set "
            "precision.fp8=none."
        )
    _check_chip(precision, asked)


def _check_options(precision: PrecisionConfig, dtype: str) -> None:
    asked = f"precision.fp8={precision.fp8}"
    if dtype != "bfloat16":
        raise ValueError(f"{asked}: needs model.dtype=bfloat16, it is {dtype}.")
    if precision.fp8_format == "hybrid" and precision.fp8 in ("blockwise", "mxfp8"):
        raise ValueError(
            f"{asked} with precision.fp8_format=hybrid: block-scaled recipes use e4m3 throughout. "
            "Set fp8_format=e4m3, or fp8=tensorwise or delayed."
        )
    if precision.first_last_layers_bf16 and precision.fp8 in ("delayed", "mxfp8"):
        raise ValueError(
            f"{asked} with precision.first_last_layers_bf16: only tensorwise and blockwise can "
            "keep single layers in BF16."
        )


def _check_chip(precision: PrecisionConfig, asked: str) -> None:
    capability = torch.cuda.get_device_capability()
    if not device.has_fp8():
        raise ValueError(
            f"{asked}: this device has compute capability {capability}; FP8 needs "
            f"{device.FP8_CAPABILITY} or newer. Set precision.fp8=none."
        )
    if precision.fp8 == "mxfp8" and capability < FIRST_BLACKWELL:
        raise ValueError(
            f"{asked}: MXFP8 needs Blackwell (compute capability {FIRST_BLACKWELL}), this device "
            f"has {capability}. Use blockwise on Hopper."
        )


def fp8_fields(precision: PrecisionConfig) -> dict[str, object]:
    """Keyword arguments of TransformerConfig for a recipe; empty without FP8."""
    if precision.fp8 == "none":
        return {}
    fields: dict[str, object] = {
        "fp8": precision.fp8_format,
        "fp8_recipe": precision.fp8,
        "fp8_param": precision.fp8_param_gather,
    }
    if precision.first_last_layers_bf16:
        fields |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": 1,
            "num_layers_at_end_in_bf16": 1,
        }
    return fields


def check_recipe_is_live(precision: PrecisionConfig, context: object) -> None:
    """Refuse a model whose FP8 context is a dummy (Megatron's silent fall-back).

    Args:
        context: what megatron.core.fp8_utils.get_fp8_recipe returned for the model's config.

    Raises:
        RuntimeError: FP8 was asked for and Megatron would run without it.
    """
    if precision.fp8 != "none" and context is None:
        raise RuntimeError(
            f"precision.fp8={precision.fp8}: Megatron-core found no Transformer Engine recipe and "
            "would run in full precision. Check that `import transformer_engine.pytorch` works."
        )
