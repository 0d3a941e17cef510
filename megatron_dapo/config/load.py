"""Read a configuration: YAML, one-level `base:` inheritance, `a.b=c` overrides.

`base:` is relative to the file that names it. Every other path, in files and overrides
alike, is relative to the current directory and becomes absolute here. Later wins: base,
file, overrides from left to right. `${oc.env:NAME,default}` reads the environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatron_dapo.config.errors import ConfigError
from megatron_dapo.config.keys import (
    documented_as,
    documented_keys,
    is_section,
    refuse_unknown_keys,
)
from megatron_dapo.config.redact import Plain, redact, redact_text
from megatron_dapo.config.schema import RunConfig
from megatron_dapo.config.versions import installed_versions
from megatron_dapo.config.whole_files import replace_durably
from megatron_dapo.config.wrong_target import RESOLVED_FILE, YAML_NAMES, instead, what_is

VERSIONS_FILE = "versions.json"


def load_config(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> RunConfig:
    """The run that `path` and `overrides` describe, every field checked by itself.

    Args:
        path: YAML file; its `base:` names one file that it differs from.
        overrides: `section.key=value`, the value read as YAML.

    Raises:
        ConfigError: unreadable file, unknown key (with the nearest one), wrong value.
            Rules between keys are `config.checks.check_config`.
    """
    file = Path(path)
    layers = [_read(file)]
    base = layers[0].pop("base", None)
    if base is not None:
        layers.insert(0, _read_base(file, base))
    for layer, source in zip(layers, _sources(file, base), strict=True):
        refuse_unknown_keys(layer, source)
    parsed = [_parse_override(item) for item in overrides]
    return _validate(_merge([*layers, *parsed], file))


def save_resolved(config: RunConfig, folder: Path) -> Path:
    """Write config.resolved.yaml and versions.json into `folder`; returns the former's path.

    No secret reaches them. `load_config` of the written file gives `config` again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    resolved = folder / RESOLVED_FILE
    versions = json.dumps(installed_versions(), indent=2) + "\n"
    replace_durably(resolved, resolved_yaml(config))
    replace_durably(folder / VERSIONS_FILE, versions)
    return resolved


def resolved_yaml(config: RunConfig) -> str:
    """Every key of `config` with its value, as YAML without secrets."""
    return yaml.safe_dump(redact(config.model_dump(mode="json")), sort_keys=False)


def exact_yaml(config: RunConfig) -> str:
    """Every key of `config` with its very value, for processes of this run and no file: a path may
    look like a secret."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _sources(file: Path, base: object) -> list[str]:
    return [str(file)] if base is None else [f"{base} (base of {file})", str(file)]


def _read(file: Path) -> dict[str, object]:
    if file.is_dir():
        raise ConfigError(
            f"CONFIG={file} {what_is(file)}; give the path of a YAML file."
            f"{instead(file, RESOLVED_FILE)}"
        )
    if not file.exists():
        raise ConfigError(
            f"configuration file {file} does not exist; give the path of a YAML file "
            f"relative to {Path.cwd()}, or an absolute one"
        )
    try:
        tree = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        what = " ".join(str(error).split())
        raise ConfigError(
            f"{file} cannot be read as YAML: {what}. Mend that line, or give a YAML file"
        ) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds a {type(tree).__name__}; it must hold `key: value` lines")
    if not tree:
        raise ConfigError(
            f"{file} is empty: a configuration has `key: value` lines, at least run_dir, "
            "model.path and data.train. Start from one of examples/"
        )
    named = {str(key): value for key, value in tree.items()}
    if file.suffix not in YAML_NAMES and not named.keys() & {"base", *RunConfig.model_fields}:
        raise ConfigError(f"{file} is no configuration of a run; give its YAML file")
    return named


def _read_base(file: Path, base: object) -> dict[str, object]:
    if not isinstance(base, str):
        raise ConfigError(f"base={base!r} in {file}: must be the name of one YAML file")
    tree = _read(file.parent / base)
    if "base" in tree:
        raise ConfigError(
            f"base={tree['base']!r} in {file.parent / base}, itself the base of {file}: "
            "inheritance has one level. Name the first file as base, and write the rest out."
        )
    return tree


def _parse_override(item: str) -> dict[str, object]:
    key, equals, _ = item.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"override {redact_text(item)!r}: must be section.key=value, for example "
            "optimizer.lr=1e-6"
        )
    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([item]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"override {key}: its value cannot be read as YAML: {error}") from error
    named = cast(dict[str, object], tree)
    refuse_unknown_keys(named, "an override")
    return named


def _merge(layers: list[dict[str, object]], file: Path) -> Mapping[str, object]:
    try:
        merged = OmegaConf.merge(*layers)
        return cast(Mapping[str, object], OmegaConf.to_container(merged, resolve=True))
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        key = error.full_key or "value"
        raise ConfigError(
            f"{key} in {file}: {first}. Set the variable or key that ${{...}} names, or give a "
            "default: ${oc.env:NAME,default}"
        ) from error


def _validate(tree: Mapping[str, object]) -> RunConfig:
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(explain(detail) for detail in error.errors()) from None


def explain(detail: ErrorDetails, section: str = "") -> str:
    """Key, value, what is allowed and what the key is for, of a value that was refused.

    Args:
        section: that was validated alone, such as data; empty: the whole configuration.
    """
    key = ".".join(str(part) for part in (*section.split(), *detail["loc"]))
    known = key
    while documented_as(known) not in documented_keys():  # inside a list, or a branch of a union
        known = known.rpartition(".")[0]
    documented = documented_as(known)
    about = documented_keys()[documented]
    if detail["type"] == "missing":
        how = "Add the section to the file." if is_section(documented) else f"Add it, or {key}=..."
        return f"{key} is required and not set: {about} {how}"
    value = redact(cast(Plain, detail["input"]), known)
    if is_section(documented) and detail["type"] == "model_type":
        keys = ", ".join(k for k in documented_keys() if k.startswith(f"{documented}."))
        return f"{known}={value!r}: must be a section with keys, one of {keys}"
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{known}={value!r}: {message}. {about}".rstrip()
