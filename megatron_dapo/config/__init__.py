"""Configuration: what a run is, read once, checked before anything is built."""

from megatron_dapo.config.schema import LossConfig, RunConfig

__all__ = ["LossConfig", "RunConfig"]
