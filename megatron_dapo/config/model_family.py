"""Which models can be trained: what config.json may say, so that nothing is computed otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Values of `model_type` in config.json."""
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The only scaled rotary embedding, with the constants that Megatron-core has built in."""


def family_problems(hf_config: Mapping[str, object]) -> Iterator[str]:
    """What the trained model would compute differently from the checkpoint's model.

    Args:
        hf_config: config.json as parsed, or with transformers' defaults filled in.
    """
    family = hf_config.get("model_type")
    if family not in FAMILIES:
        yield (
            f"model.path: its config.json has model_type={family!r}; can train "
            f"{', '.join(FAMILIES)}. Choose a model of one of these families."
        )
        return
    quantization = hf_config.get("quantization_config")
    if quantization is not None:
        yield (
            f"model.path: its config.json has quantization_config={quantization!r}; can train "
            "weights in bfloat16 or float32 alone. Give the model that was not quantised, or write "
            "it out in bfloat16 first."
        )
    wanted: dict[str, object] = {"hidden_act": "silu"}
    wanted["mlp_bias" if family == "llama" else "use_sliding_window"] = False
    if family != "qwen2":
        wanted["attention_bias"] = False
    for key, allowed in wanted.items():
        value = hf_config.get(key, allowed)
        if value != allowed:
            yield (
                f"model.path: its config.json has {key}={value!r}; of a {family} model only "
                f"{key}={allowed!r} can be trained. Choose another model."
            )
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling")
    if isinstance(rope, Mapping) and not _can_rotate(rope):
        yield (
            f"model.path: its config.json has rope_parameters (rope_scaling) {dict(rope)}; can "
            f"train rope_type default, or llama3 with {LLAMA3_ROPE}. Choose another model."
        )


def _can_rotate(rope: Mapping[str, object]) -> bool:
    kind = rope.get("rope_type", rope.get("type", "default"))
    fixed = all(rope.get(key) == value for key, value in LLAMA3_ROPE.items())
    return kind == "default" or (kind == "llama3" and fixed)
