"""Storage: a thin layer over Orbax: a folder of numbered steps, and the arrays of one step.

When an array cannot be read, Orbax raises at once and closes its event loop while other arrays are still being read.
Those reads finish later, in other threads, and raise errors at arbitrary points of the program. `read_arrays` cancels
the remaining reads, waits for them, and drops their late callbacks. A failed read thus leaves nothing behind.
"""

import asyncio
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp


def open_steps(folder: pathlib.Path, **options: Any) -> ocp.CheckpointManager:
    """Open the numbered steps of a folder."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs every step; its errors are reported here
    return ocp.CheckpointManager(folder.absolute(), options=ocp.CheckpointManagerOptions(**options))


def read_arrays(folder: pathlib.Path, wanted: Any, *, part: bool = False) -> Any:
    """Read a saved tree of arrays from a folder, in the shapes and shardings of `wanted`.

    With `part`, `wanted` may be a subset of the saved tree; otherwise the two must have the same structure.
    """
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, _Arrays()))
    arguments = ocp.args.PyTreeRestore(
        item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=part
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as reader:
        return reader.restore(folder.absolute(), args=arguments)


class _Arrays(ocp.type_handlers.ArrayHandler):
    """Reads arrays. When one of them cannot be read, it cancels all other reads before it raises."""

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[jax.Array]:
        before = asyncio.all_tasks()
        try:
            return await super().deserialize(infos, args)
        except BaseException:
            _drop_what_comes_after_closing(asyncio.get_running_loop())
            left = asyncio.all_tasks() - before
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)  # only the first error is raised
            raise


def _drop_what_comes_after_closing(loop: asyncio.AbstractEventLoop) -> None:
    """Ignore callbacks after the loop is closed: the thread of a cancelled read may still schedule one when it ends."""
    call = loop.call_soon_threadsafe

    def call_if_open(*arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except RuntimeError:
            if not loop.is_closed():
                raise

    loop.call_soon_threadsafe = call_if_open  # type: ignore[method-assign, assignment]
