"""Keep secrets out of what is printed and saved. Configuration has no key fields at all."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

REDACTED = "***"
_SECRET_NAME = re.compile(
    r"(^|[_.\-])(key|apikey|token|secret|password|passwd|credentials?|auth)$", re.IGNORECASE
)
_URL_PASSWORD = re.compile(r"(:/{1,2}[^/\s@:]+:|://)[^/\s@]+@")
_KNOWN_TOKENS = re.compile(r"\b(hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_\-]{32,}|gh[pousr]_\w{30,})")

Plain = str | int | float | bool | None | Sequence["Plain"] | Mapping[str, "Plain"]


def names_a_secret(name: str) -> bool:
    """True for wandb_api_key, hub.token, ...; false for tokens_per_micro_batch."""
    return _SECRET_NAME.search(name) is not None


def redact_text(text: str) -> str:
    """`text` without user:password of URLs and without well-known token shapes."""
    return _KNOWN_TOKENS.sub(REDACTED, _URL_PASSWORD.sub(rf"\1{REDACTED}@", text))


def redact(value: Plain, name: str = "") -> Plain:
    """A copy of nested plain data in which no value that looks like a secret is left."""
    if name and names_a_secret(name) and value is not None:
        return REDACTED
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [redact(item) for item in value]
    return value
