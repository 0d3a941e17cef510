"""Configuration: what a run is, read once, checked before anything is built."""

from megatron_dapo.config.checks import check_config
from megatron_dapo.config.errors import ConfigError
from megatron_dapo.config.load import load_config
from megatron_dapo.config.machine_checks import check_run
from megatron_dapo.config.schema import LossConfig, RunConfig

__all__ = ["ConfigError", "LossConfig", "RunConfig", "check_config", "check_run", "load_config"]
