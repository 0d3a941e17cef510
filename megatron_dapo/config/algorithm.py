"""Keys of the algorithm: reward, advantages, policy loss and critic."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_dapo.config.section import (
    AnswerStyle,
    Coefficient,
    Fraction,
    LearningRate,
    NaturalInt,
    PositiveInt,
    Seconds,
    Section,
    WholeSeconds,
)


class RewardConfig(Section):
    """Rule reward (DAPO Eq. 7) and length shaping (Eq. 13)."""

    style: AnswerStyle = "answer_line"
    """Where the answer is read. dapo_reference reproduces the published grader bit by bit."""
    correct: float = Field(default=1.0, ge=-1000.0, le=1000.0)
    """Reward of a right answer."""
    incorrect: float = Field(default=-1.0, ge=-1000.0, le=1000.0)
    """Reward of a wrong or missing answer."""
    overlong_buffer_tokens: NaturalInt = 4096
    """L_cache of Eq. 13: the last tokens before the limit are punished linearly. 0: off."""
    overlong_penalty: Coefficient = 1.0
    """Punishment at max_response_tokens and beyond."""
    filter_truncated: bool = False
    """Overlong filtering: truncated responses count in the group's statistics but do not train."""
    math_verify: bool = False
    """Ask the package math-verify, in a worker, whether an answer that is no number to us equals
    the truth after all: surds, intervals, sets, formulas. Costs milliseconds, on a miss only."""
    plugin: str | None = None
    """dotted.path:function(prompt, response, answer, meta) -> float or dict of named parts. It is
    imported and runs in workers, each with its own copy of the module."""
    plugin_network: bool = False
    """Let the plug-in reach the network, for example another model that judges."""
    plugin_environment: tuple[str, ...] = ()
    """Names of environment variables that the plug-in sees beside PATH, PYTHONPATH and locale."""
    workers: int = Field(default=2, gt=0, le=1024)
    """Processes that run the plug-in or math-verify; without both, none is started."""
    time_limit_seconds: Seconds = 10.0
    """Longest call of a worker. Then it is killed and the response masked, never counted wrong."""
    cpu_limit_seconds: WholeSeconds = 10
    """CPU time of a call, all threads of the worker together, in whole seconds."""
    memory_limit_mib: PositiveInt = 2048
    """Address space that calls may add to what a worker has after its imports."""
    max_error_share: Fraction = 0.05
    """Share of a step's responses whose grader may fail (reward/errors); above it the run stops."""


class AdvantageConfig(Section):
    """What an advantage is relative to: the group (DAPO Eq. 9) or a critic (PPO)."""

    estimator: Literal["group", "gae"] = "group"
    """group: the other responses of the prompt. gae: a critic's values (PPO, arXiv 1707.06347),
    whitened over the rollout batch; trains a second model, see `critic`."""
    gamma: float = Field(default=1.0, gt=0.0, le=1.0)
    """Discount a token; gae only. 1: the length of an answer does not matter."""
    lam: float = Field(default=1.0, ge=0.0, le=1.0)
    """Lambda of generalised advantage estimation (arXiv 1506.02438); gae only. 1: no bias from the
    critic; below, less variance. verl: 1; PPO on short tasks: 0.95."""
    normalize_std: bool = True
    """Divide by the group's standard deviation. Off: Dr.GRPO."""
    unbiased: bool = True
    """n - 1 in that deviation (verl, NeMo-RL, TRL). Off: population."""
    eps: float = Field(default=1e-6, ge=0.0, le=1.0)
    """Added to that deviation."""


class LossConfig(Section):
    """Policy loss. Defaults are DAPO's (arXiv 2503.14476, 4.1)."""

    ratio: Literal["token", "sequence"] = "token"
    """token: DAPO Eq. 8. sequence: GSPO, for MoE policies whose routing drifts; in the GSPO-token
    form, so that advantages may differ by token (advantage.estimator = gae)."""
    objective: Literal["ppo", "cispo"] = "ppo"
    """ppo: clipped surrogate. cispo: clipped, detached weight times log-prob."""
    clip_low: float = Field(default=0.2, ge=1e-9, le=1000.0)
    """Ratio may fall to 1 - clip_low. GSPO uses 3e-4."""
    clip_high: float = Field(default=0.28, ge=1e-9, le=1000.0)
    """Ratio may rise to 1 + clip_high; above clip_low it keeps rare tokens alive. GSPO: 4e-4."""
    dual_clip: float | None = Field(default=None, gt=1.0, le=1e6)
    """Caps the loss of tokens with negative advantage at ratio = dual_clip. The script uses 10."""
    aggregation: Literal["token_mean", "sequence_mean", "group_token_mean", "constant"] = (
        "token_mean"
    )
    """token_mean: over all counted tokens of the update. group_token_mean: Eq. 8 as printed.
    sequence_mean: GRPO, GSPO. constant: Dr.GRPO."""
    constant_tokens: PositiveInt | None = None
    """Divisor of each response with aggregation = constant."""
    kl_coef: Coefficient = 0.0
    """Weight of the KL to the reference policy in the loss. DAPO: none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of that KL. k3: never negative, low variance (GRPO)."""
    entropy_coef: Coefficient = 0.0
    """Weight of the entropy bonus. DAPO: none."""
    mismatch: Literal[
        "none", "tis_token", "tis_sequence", "icepop", "sequence_mask", "geometric"
    ] = "none"
    """Correction of the gap between engine and trainer log-probs: a weight w = old / rollout on
    each token's clipped loss, without gradient. tis_token: min(w, high). icepop: w inside the
    bounds, else 0. tis_sequence, sequence_mask: the same two, w being the response's product.
    geometric: w is the geometric mean; like the others it is the weight and not only the test, so
    a kept response weighs neither 1 nor each token's own w. Tokens that weigh 0 still count in the
    denominator."""
    mismatch_low: float = Field(default=0.0, ge=0.0, le=1e6)
    """Lower bound of the correction's weight; truncation does not read it."""
    mismatch_high: float = Field(default=2.0, ge=1e-9, le=1e6)
    """Upper bound of the correction's weight."""


class CriticConfig(Section):
    """The value model of PPO: the policy's start weights under a scalar head. Read only with
    advantage.estimator = gae; what is not here is as in `optimizer`."""

    lr: LearningRate = 1e-5
    """Constant after optimizer.warmup_steps. verl: 1e-5, above the policy's: the head is new."""
    clip_width: float = Field(default=0.5, ge=1e-9, le=1e6)
    """A value that moves further than this from what it was at the rollout has no gradient, in
    units of reward. verl: 0.5; PPO's 0.2 is for returns of unit scale."""
