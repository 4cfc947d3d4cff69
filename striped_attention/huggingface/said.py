"""Said: what a config.json says, asked for name by name, with a complaint in one line for what cannot be."""

import dataclasses
import json
import pathlib
from typing import Any, NoReturn

from striped_attention.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Said:
    """What a config.json says, or a part of it. Every complaint begins with `where`."""

    where: str
    values: dict[str, Any]

    def refuse(self, text: str) -> NoReturn:
        raise UsageError(f"{self.where} {text}")

    def number(self, name: str, default: int | float | None = None) -> float:
        """A number above 0; `default` where there is none or null. Without a default there must be one."""
        value = default if self.values.get(name) is None else self.values[name]
        if value is None:
            self.refuse(f"does not say {name}, without which a model is not known. Take the model's own file.")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**63:
            self.refuse(f"must give a number above 0 as {name}; got {value!r}.")
        return float(value)

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if not value.is_integer():
            self.refuse(f"must give a whole number as {name}; got {value}.")
        return int(value)

    def optional(self, name: str, default: float | None) -> float | None:
        """A number above 0, or None where it is null; `default` where nothing is said."""
        if self.is_null(name) or (name not in self.values and default is None):
            return None
        return self.number(name, default)

    def is_null(self, name: str) -> bool:
        """Said to be nothing, which is not the same as not said."""
        return name in self.values and self.values[name] is None


def read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. It belongs to every Hugging Face model.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}). Is it cut short? Download the model again.") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} must hold a JSON object; got {type(found).__name__}. Download the model again.")
    return found
