"""What a finished model leaves in its process; walks over many layouts clear it between two."""

from __future__ import annotations

from megatron_dapo import device
from megatron_dapo.policy.trained_model import TrainedModel

device.install_cpu_support()

from megatron.core.models.common.embeddings.rotary_pos_embedding import (  # noqa: E402
    RotaryEmbedding,
)
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402


def dissolve(model: TrainedModel) -> None:
    """Let go of what keeps `model`, and with it its groups' threads, alive for ever.

    A token dispatcher holds the autograd graph of its last tokens, which leads back to the model
    on a way that Python's collector does not see. One cache over all instances holds rotary
    embeddings, which know their context group.
    """
    for chunk in model.chunks:
        for module in chunk.modules():
            if isinstance(module, MoELayer):
                module.token_dispatcher = None
    RotaryEmbedding.forward.cache_clear()
