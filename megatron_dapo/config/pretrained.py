"""The config.json of a model folder as transformers reads it; imported where transformers is needed
anyway."""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from megatron_dapo.config.errors import ConfigError
from megatron_dapo.config.schema import ModelConfig

LONGEST_REASON = 500
"""Characters."""


def pretrained_config(model: ModelConfig) -> PretrainedConfig:
    """Every shape of the model, with the defaults of its family.

    Raises:
        ConfigError: a value has another type than its family's, contradicts another one, or asks
            to run Python of the folder.
    """
    try:
        return AutoConfig.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code, local_files_only=True
        )
    except (
        *(StrictDataclassError, OSError),
        *(AttributeError, KeyError, RuntimeError, TypeError, ValueError),
    ) as error:
        reason = " ".join(str(error).split())[:LONGEST_REASON]
        raise ConfigError(
            f"model.path={model.path}: transformers cannot use its config.json: {reason}. Mend "
            "that value, or fetch the model folder again"
        ) from error
