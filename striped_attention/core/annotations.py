"""Type annotations are for readers and static type checkers; public functions check their arguments themselves."""

import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

if TYPE_CHECKING:

    def checks_itself(function: Function) -> Function: ...

else:
    # Public functions explain a wrong argument better than a runtime type checker would.
    checks_itself = typing.no_type_check
