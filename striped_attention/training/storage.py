"""Storage: Orbax as it is used here: a folder of numbered steps, and the arrays of one of them.

When an array cannot be read, Orbax raises at once and closes its event loop while other arrays are still being read.
Those reads finish later, in other threads, and complain wherever the process is by then. `read_arrays` cancels them and
waits for them; what their threads still have to say is dropped. So a failed read leaves nothing behind.
"""

import asyncio
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp


def open_steps(folder: pathlib.Path, **options: Any) -> ocp.CheckpointManager:
    """The numbered steps of a folder."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax tells of every step, and we of its errors
    return ocp.CheckpointManager(folder.absolute(), options=ocp.CheckpointManagerOptions(**options))


def read_arrays(folder: pathlib.Path, wanted: Any, *, part: bool = False) -> Any:
    """The arrays of a tree that was saved in a folder, in the shapes and shardings of `wanted`.

    With `part`, `wanted` may be a part of what was saved; without, they must be the same tree.
    """
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, _Arrays()))
    arguments = ocp.args.PyTreeRestore(
        item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=part
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as reader:
        return reader.restore(folder.absolute(), args=arguments)


class _Arrays(ocp.type_handlers.ArrayHandler):
    """Reads arrays. When one of them cannot be read, it ends all other reads before it raises."""

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[jax.Array]:
        before = asyncio.all_tasks()
        try:
            return await super().deserialize(infos, args)
        except BaseException:
            _drop_what_comes_after_closing(asyncio.get_running_loop())
            left = asyncio.all_tasks() - before
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)  # the first error is the one to tell
            raise


def _drop_what_comes_after_closing(loop: asyncio.AbstractEventLoop) -> None:
    """A thread whose read was cancelled reports to the loop when it is done, and the loop may be closed by then."""
    call = loop.call_soon_threadsafe

    def call_if_open(*arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except RuntimeError:
            if not loop.is_closed():
                raise

    loop.call_soon_threadsafe = call_if_open  # type: ignore[method-assign, assignment]
