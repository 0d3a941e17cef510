"""What every section of the configuration is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
)


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


LocalPath = Annotated[Path, AfterValidator(_absolute)]
"""A file or folder; made absolute, so that a saved configuration means the same anywhere."""
MOST = 2**31 - 1
"""Of whatever is counted: numbers of 32 bits go everywhere."""
LONGEST_SECONDS = 30 * 86_400
"""A month: what waits longer waits for ever, and clocks of libraries end somewhere."""
PositiveInt = Annotated[int, Field(gt=0, le=MOST)]
NaturalInt = Annotated[int, Field(ge=0, le=MOST)]
Ranks = Annotated[int, Field(gt=0, le=65_536)]
"""Processes of one kind, or machines."""
WholeSeconds = Annotated[int, Field(gt=0, le=LONGEST_SECONDS)]
"""A limit of time."""
Seconds = Annotated[float, Field(ge=0.01, le=LONGEST_SECONDS)]
"""A limit of time, or a pause: below it a loop only turns."""
LearningRate = Annotated[float, Field(ge=1e-12, le=1.0)]
Temperature = Annotated[float, Field(ge=0.0, le=100.0)]
Coefficient = Annotated[float, Field(ge=0.0, le=1000.0)]
"""Of a term that is added to the loss, or taken from a reward."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
UserName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$")]
"""A name that the user gives to a part of the configuration; without dots, so that overrides can
reach into it."""
PromptFormat = Literal["dapo", "chat", "plain"]
AnswerStyle = Literal["answer_line", "boxed", "either", "dapo_reference"]


class Section(BaseModel):
    """A frozen group of keys; an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """`true` would be read as 1: a switch where a number belongs is a mistake."""
        assert info.field_name is not None, "a field is being validated"
        kind = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and not _takes_bool(kind):
            raise ValueError(f"must not be {str(value).lower()}")
        return value


def _takes_bool(kind: object) -> bool:
    return kind is bool or any(map(_takes_bool, get_args(kind)))
