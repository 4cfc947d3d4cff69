"""Said: read the values of a config.json by name, with one-line errors for invalid ones."""

import dataclasses
import json
import pathlib
from typing import Any, NoReturn

from striped_attention.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Said:
    """The values of a config.json, or of a part of it. Every error begins with `where`."""

    where: str
    values: dict[str, Any]

    def refuse(self, text: str) -> NoReturn:
        raise UsageError(f"{self.where} {text}")

    def number(self, name: str, default: int | float | None = None) -> float:
        """Return a number above 0, or `default` if it is missing or null. Without a default it is required."""
        value = default if self.values.get(name) is None else self.values[name]
        if value is None:
            self.refuse(f"lacks {name}, which is required. Use the model's own file.")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**63:
            self.refuse(f"must give a number above 0 as {name}; got {value!r}.")
        return float(value)

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if not value.is_integer():
            self.refuse(f"must give a whole number as {name}; got {value}.")
        return int(value)

    def optional(self, name: str, default: float | None) -> float | None:
        """Return a number above 0, None if it is null, or `default` if it is missing."""
        if self.is_null(name) or (name not in self.values and default is None):
            return None
        return self.number(name, default)

    def is_null(self, name: str) -> bool:
        """Whether a value is explicitly null, as opposed to missing."""
        return name in self.values and self.values[name] is None


def read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Every Hugging Face model has one.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}). Is it cut short? Download the model again.") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} must hold a JSON object; got {type(found).__name__}. Download the model again.")
    return found
