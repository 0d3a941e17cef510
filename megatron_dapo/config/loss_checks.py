"""Rules of the policy loss: clip widths, aggregation and corrections that belong together.

Each rule yields complete messages: key, value seen, what is allowed, what to do.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dapo.config.schema import LossConfig

GSPO_WIDEST_CLIP = 0.1
DEFAULTS = LossConfig()


def loss_problems(loss: LossConfig) -> Iterator[str]:
    """Everything that a loss refuses before a run starts."""
    if loss.ratio == "sequence":
        yield from _sequence_width_problems(loss)
        yield from sequence_ratio_problems(loss)
    elif loss.objective == "ppo":
        yield from _ppo_problems(loss)
    else:
        yield from _cispo_problems(loss)
    if loss.aggregation == "constant" and loss.constant_tokens is None:
        yield (
            "loss.constant_tokens is not set: loss.aggregation=constant divides each response by "
            "it. Dr.GRPO uses rollout.max_response_tokens."
        )
    if loss.aggregation != "constant" and loss.constant_tokens is not None:
        yield (
            f"loss.constant_tokens={loss.constant_tokens}: read only with "
            f"loss.aggregation=constant, which is {loss.aggregation}. Leave it out."
        )
    if loss.kl_coef == 0 and loss.kl_estimator != DEFAULTS.kl_estimator:
        yield (
            f"loss.kl_estimator={loss.kl_estimator}: not read with loss.kl_coef=0. Leave it out, "
            "or set loss.kl_coef."
        )
    yield from _mismatch_problems(loss)


def _widths(loss: LossConfig) -> str:
    return f"loss.clip_low={loss.clip_low} and loss.clip_high={loss.clip_high}"


def _ppo_problems(loss: LossConfig) -> Iterator[str]:
    if loss.clip_low > loss.clip_high:
        yield f"{_widths(loss)}: need clip_low <= clip_high. DAPO uses 0.2 and 0.28."
    if loss.clip_low >= 1:
        yield f"loss.clip_low={loss.clip_low}: must be below 1, the ratio is never negative."
    if loss.dual_clip is not None and loss.dual_clip <= 1 + loss.clip_high:
        yield (
            f"loss.dual_clip={loss.dual_clip}: must be above 1 + loss.clip_high = "
            f"{1 + loss.clip_high}. The released script uses 10."
        )


def _cispo_problems(loss: LossConfig) -> Iterator[str]:
    usual = loss.clip_low == DEFAULTS.clip_low or loss.clip_high == DEFAULTS.clip_high
    if usual or loss.clip_high < 1:
        yield (
            f"{_widths(loss)}: loss.objective=cispo needs its own clip widths, set both, clip_high "
            "to at least 1. With DAPO's the weight would be cut on both sides; without a lower "
            "bound and with a cap of 5 they are 1.0 and 4.0."
        )
    if loss.clip_low > 1:
        yield (
            f"loss.clip_low={loss.clip_low}: at most 1, which is no lower bound already; the ratio "
            "is never negative."
        )
    if loss.dual_clip is not None:
        yield (
            f"loss.dual_clip={loss.dual_clip}: loss.objective=cispo has no dual clip; leave it out."
        )


def _sequence_width_problems(loss: LossConfig) -> Iterator[str]:
    if max(loss.clip_low, loss.clip_high) > GSPO_WIDEST_CLIP:
        yield (
            f"{_widths(loss)}: loss.ratio=sequence (GSPO) needs its own clip widths, at most "
            f"{GSPO_WIDEST_CLIP}, since a mean over tokens hardly moves. Use 3e-4 and 4e-4."
        )
    elif loss.clip_low > loss.clip_high:
        yield f"{_widths(loss)}: need clip_low <= clip_high. GSPO uses 3e-4 and 4e-4."


def sequence_ratio_problems(loss: LossConfig) -> Iterator[str]:
    """What a ratio of whole responses (GSPO) is not defined with; nothing for a token's ratio.

    The loss refuses these too, wherever its config comes from. Clip widths are another matter: any
    width has a loss, but only narrow ones train.
    """
    if loss.ratio != "sequence":
        return
    if loss.aggregation != "sequence_mean":
        yield (
            f"loss.aggregation={loss.aggregation}: loss.ratio=sequence has one term a response, so "
            "it needs loss.aggregation=sequence_mean."
        )
    if loss.objective == "cispo":
        yield (
            "loss.objective=cispo: weighs each token by its own ratio, so it needs "
            "loss.ratio=token. Use loss.objective=ppo for GSPO."
        )
    if loss.dual_clip is not None:
        yield (
            f"loss.dual_clip={loss.dual_clip}: not defined for loss.ratio=sequence; leave it out."
        )


def _mismatch_problems(loss: LossConfig) -> Iterator[str]:
    low, high = loss.mismatch_low, loss.mismatch_high
    unread = {
        "none": ("mismatch_low", "mismatch_high"),
        "tis_token": ("mismatch_low",),
        "tis_sequence": ("mismatch_low",),
    }.get(loss.mismatch, ())
    for key in unread:
        value, usual = loss.model_dump()[key], DEFAULTS.model_dump()[key]
        if value != usual:
            yield (
                f"loss.{key}={value}: not read with loss.mismatch={loss.mismatch}. Leave it out "
                f"(its default is {usual})."
            )
    if loss.mismatch != "none" and not low < 1 <= high:
        yield (
            f"loss.mismatch_low={low} and loss.mismatch_high={high}: need mismatch_low < 1 <= "
            "mismatch_high, or tokens without any mismatch are cut. Usual: tis_token 0 and 2, "
            "icepop 0.5 and 5, geometric 0.999 and 1.001."
        )
    elif not unread and not {"mismatch_low", "mismatch_high"} <= loss.model_fields_set:
        yield (
            f"loss.mismatch_low={low} and loss.mismatch_high={high}: loss.mismatch={loss.mismatch} "
            "needs its own bounds, set both. Usual: icepop 0.5 and 5, geometric 0.999 and 1.001, "
            "sequence_mask 0 and 3."
        )
