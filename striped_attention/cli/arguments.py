"""Options from a file: `--config FILE` stands for the options in a JSON or TOML file.

Names are those of the flags, with dashes or underscores: `preset = "1b"`, `data = ["a=0.7", "b=0.3"]`. A flag on the
command line overrides the file, except that `true` stays, and values of flags that may be repeated are added. The
run.json of `striped train` works as well: it yields the options of its newest start.
"""

import dataclasses
import difflib
import json
import pathlib
import tomllib
import typing
from collections.abc import Sequence
from typing import Any

import tyro

from striped_attention.errors import UsageError
from striped_attention.options import OF_A_START

FLAG = "--config"


def expand(command: str, options: type, arguments: Sequence[str]) -> list[str]:
    """Replace every `--config FILE` by the options in the file, ahead of the flags that were given.

    `options` is the dataclass of the command's options.
    """
    rest, files = [], []
    left = iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        if name != FLAG:
            rest.append(argument)
            continue
        path = value if equals else next(left, "")
        if not path or path.startswith("--"):
            raise UsageError(f"{FLAG} needs a JSON or TOML file of options.")
        files.append(pathlib.Path(path))
    flags = [flag for path in files for flag in flags_of(read(path), f"{FLAG} {path}", command, options)]
    return add_first(rest, flags)


def add_first(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Add flags ahead of the flags in `arguments`, which override them."""
    first = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    return [*arguments[:first], *flags, *arguments[first:]]


def _known(options: type[Any]) -> dict[str, bool]:
    """The names of all options, aliases included, and whether a list is given by repeating the flag."""
    known = {}
    hints = typing.get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        marks = typing.get_args(hints[field.name])[1:]
        aliases = [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()]
        names = [field.name, *(getattr(mark, "name", None) or field.name for mark in marks), *aliases]
        for name in names:
            known[name.lstrip("-").replace("-", "_")] = tyro.conf.UseAppendAction in marks
    return known


def given(arguments: Sequence[str]) -> dict[str, str]:
    """Return the flags in `arguments` by option name, each with its last value, or "" if it has none."""
    found = {}
    for i, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            after = "".join(arguments[i + 1 : i + 2])
            found[name.replace("-", "_")] = value if equals else "" if after.startswith("--") else after
    return found


def flags_of(found: dict[str, Any], where: str, command: str, options: type[Any]) -> list[str]:
    """Return options found in a file as flags; `where` names the file in errors."""
    known, flags = _known(options), []
    for written, value in found.items():
        name = written.replace("-", "_")
        flag = f"--{name.replace('_', '-')}"
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"{where}: {written!r} is not an option of striped {command}.{hint}")
        if value is None or value is False:
            continue
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) and any(str(one).startswith("--") for one in value) and not known[name]:
            raise UsageError(f"{where}: values of {written!r} must not start with --; got {value}.")
        if any(isinstance(one, dict | list | bool | None) for one in values) and value is not True:
            raise UsageError(f"{where}: {written!r} must be text, a number, true, false or a list of text or numbers.")
        if value is True:
            flags.append(flag)
        elif isinstance(value, list) and not known[name]:
            flags += [flag, *map(str, value)]
        else:
            flags += [f"{flag}={one}" for one in values]
    return flags


def read(path: pathlib.Path) -> dict[str, Any]:
    """The options in a file, by name."""
    try:
        text = path.read_text()
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise UsageError(f"{FLAG} {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # from TOML, JSON or UTF-8
        kind = "TOML" if path.suffix == ".toml" else "JSON; names of TOML files end in .toml"
        raise UsageError(f"{FLAG} {path} is not valid {kind}: {error}.") from error
    if isinstance(found, list) and found and isinstance(found[-1], dict):  # run.json
        found = found[-1].get("options")
        found = {k: v for k, v in found.items() if k not in OF_A_START} if isinstance(found, dict) else found
    if not isinstance(found, dict):
        raise UsageError(f'{FLAG} {path} must hold one table of options, like {{"preset": "1b"}}.')
    return found
