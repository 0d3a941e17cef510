"""Every configuration key, and the nearest one to a key that does not exist."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import get_args, get_origin

from megatron_dapo.config.errors import ConfigError
from megatron_dapo.config.redact import names_a_secret
from megatron_dapo.config.schema import RunConfig, Section

FOREIGN_NAMES = {
    "train_batch_size": "rollout.prompts_per_step",
    "num_prompts_per_step": "rollout.prompts_per_step",
    "rollout_batch_size": "rollout.prompts_per_step",
    "n_samples_per_prompt": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "ppo_mini_batch_size": "training.responses_per_update",
    "mini_batch_size": "training.responses_per_update",
    "global_batch_size": "training.responses_per_update",
    "ppo_max_token_len_per_gpu": "training.tokens_per_micro_batch",
    "clip_ratio_low": "loss.clip_low",
    "clip_ratio_high": "loss.clip_high",
    "eps_clip_high": "loss.clip_high",
    "clip_ratio_c": "loss.dual_clip",
    "loss_agg_mode": "loss.aggregation",
    "adv_estimator": "advantage.estimator",
    "cliprange_value": "critic.clip_width",
    "learning_rate": "optimizer.lr",
    "max_completion_length": "rollout.max_response_tokens",
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "context_parallel_size": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
}
"""Names that users bring from other systems -> ours (suggested, never accepted)."""


NAME = "NAME"
"""Stands in documented keys for a name that the user gives: evaluation.sets.NAME.path."""


@cache
def documented_keys() -> Mapping[str, str]:
    """Dotted key -> its documentation; sections as well as leaves."""
    return dict(_walk(RunConfig, ""))


def documented_as(key: str) -> str:
    """`key` as `documented_keys` has it, where it does: the user's names as NAME."""
    parts = key.split(".")
    for place in range(1, len(parts)):
        if ".".join([*parts[:place], NAME]) in documented_keys():
            parts[place] = NAME
    return ".".join(parts)


def _walk(section: type[Section], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        kind = field.annotation
        if get_origin(kind) is dict:
            yield key, " ".join((field.description or "").split())
            key, kind = f"{key}.{NAME}", get_args(kind)[1]
        if isinstance(kind, type) and issubclass(kind, Section):
            yield key, " ".join((kind.__doc__ or "").split())
            yield from _walk(kind, f"{key}.")
        else:
            yield key, " ".join((field.description or "").split())


def is_section(key: str) -> bool:
    """True for a group of keys such as `loss`."""
    return any(other.startswith(f"{key}.") for other in documented_keys())


def nearest_key(unknown: str) -> str | None:
    """The key that `unknown` most likely means, or None when nothing comes close."""
    keys = documented_keys()
    leaf = unknown.rpartition(".")[2]
    if leaf in FOREIGN_NAMES:
        return FOREIGN_NAMES[leaf]
    same_leaf = [key for key in keys if key.rpartition(".")[2] == leaf]
    if same_leaf:
        return _in_the_meant_section(unknown.rpartition(".")[0], same_leaf)
    depth = [key for key in keys if key.count(".") == unknown.count(".")]
    close = difflib.get_close_matches(unknown, depth, n=1, cutoff=0.75)
    if close:
        return close[0]
    best = max(keys, key=lambda key: _likeness(leaf, key.rpartition(".")[2]))
    return best if _likeness(leaf, best.rpartition(".")[2]) >= 0.7 else None


def _in_the_meant_section(section: str, keys: Sequence[str]) -> str:
    """Of keys with one name: that whose section is only misspelt, else the first documented one."""
    nearest = max(keys, key=lambda key: _likeness(section, key.rpartition(".")[0]))
    misspelt = _likeness(section, nearest.rpartition(".")[0]) >= 0.75
    return nearest if misspelt else keys[0]


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def refuse_unknown_keys(tree: Mapping[str, object], source: str) -> None:
    """Raise a ConfigError that names each key of `tree` that does not exist.

    Args:
        tree: nested mapping as read from `source`, a file name or an override.
    """
    problems = [_explain(key, source) for key in _unknown(tree, "")]
    if problems:
        raise ConfigError(problems)


def _unknown(tree: Mapping[str, object], prefix: str) -> Iterator[str]:
    keys = documented_keys()
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if documented_as(key) not in keys:
            yield key
        elif isinstance(value, Mapping) and is_section(documented_as(key)):
            yield from _unknown(value, f"{key}.")


def _explain(key: str, source: str) -> str:
    where = f"unknown config key {key} in {source}."
    if names_a_secret(key):
        return f"{where} Secrets never go into a configuration: use the environment or netrc."
    nearest = nearest_key(documented_as(key))
    if nearest is None:
        sections = ", ".join(k for k in documented_keys() if "." not in k)
        return f"{where} Top-level keys: {sections}. Remove it."
    return f"{where} Did you mean {_with_names_of(key, nearest)}?"


def _with_names_of(key: str, documented: str) -> str:
    """`documented` with the names that the user gave in `key`, where it has them."""
    pairs = itertools.zip_longest(documented.split("."), key.split("."), fillvalue="")
    return ".".join((theirs or ours) if ours == NAME else ours for ours, theirs in pairs if ours)
