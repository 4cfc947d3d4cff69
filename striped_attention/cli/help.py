"""Help texts of options, without the line breaks of the source."""

import ast
import functools
import inspect
import itertools
import textwrap
import typing
from typing import Annotated, Any

import tyro

CONFIG = "Options can also be read from a TOML or JSON file, or from the run.json of a run: --config FILE."


@functools.cache
def join_lines(options: type[Any]) -> None:
    """Give every option of a dataclass its docstring as help text, on one line that tyro wraps to the terminal.

    By itself, tyro keeps the line breaks of docstrings whose further lines are indented. The description also gets the
    option --config, which is read before tyro sees the options.
    """
    options.__doc__ = f"{inspect.getdoc(options)}\n\n{CONFIG}"
    hints = typing.get_type_hints(options, include_extras=True)
    for name, text in docstrings(options).items():
        options.__annotations__[name] = Annotated[hints[name], tyro.conf.arg(help=text)]


def docstrings(options: type[Any]) -> dict[str, str]:
    """Return the docstring of every field of a dataclass, each on one line."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(options))).body[0]
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, after in itertools.pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            text = ast.literal_eval(after.value)
            found[field.target.id] = " ".join(text.split())
    return found
