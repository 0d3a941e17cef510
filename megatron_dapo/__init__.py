"""Reinforcement-learning post-training with DAPO on Megatron-core and vLLM.

    config = megatron_dapo.load_config("dapo.yaml", ["optimizer.lr=2e-6"])

Importing this loads no torch: what trains is in `megatron_dapo.trainer`.
"""

from megatron_dapo.config import load_config

__all__ = ["load_config"]
