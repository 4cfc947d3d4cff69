"""Weights & Biases: log a run's metrics to wandb.ai, with --wandb PROJECT.

The package is imported only with this option. `wandb.json` in the run's folder keeps the W&B run id, so --resume
continues the same W&B run. Steps repeated after a crash are logged again under the same number: charts use `step` as
their axis, not the order of logging. WANDB_MODE, WANDB_API_KEY, WANDB_DIR and the like work as usual.
"""

import json
import pathlib
import uuid
from collections.abc import Callable
from typing import Any

from striped_attention.errors import UsageError
from striped_attention.training.checkpoint import first_line, write_whole
from striped_attention.training.config import TrainConfig
from striped_attention.training.folder import WANDB


class WandbRun:
    """A run on wandb.ai, or, with WANDB_MODE=offline, in a folder that `wandb sync` uploads later."""

    def __init__(self, config: TrainConfig) -> None:
        wandb = _package()
        self.project, folder = config.wandb, config.checkpoint_dir
        earlier = _earlier(folder, config.wandb) if config.resume and folder is not None else None
        self.id = earlier or uuid.uuid4().hex[:12]
        try:
            self._run = wandb.init(
                project=self.project,
                id=self.id,
                resume="allow",
                name=None if folder is None else folder.absolute().name,
                config={**config.record(), "parameters": config.model.parameters},
                allow_val_change=True,  # a resumed run may have more steps, or another mesh
                settings=wandb.Settings(console="off", quiet=True),  # W&B's console capture would record every frame
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except wandb.errors.Error as error:
            raise UsageError(
                f"--wandb {self.project}: Weights & Biases reported: {first_line(error)}. Set "
                f"WANDB_MODE=offline to upload the run later with `wandb sync`, or leave out --wandb."
            ) from error

    def keep(self, folder: pathlib.Path) -> None:
        """Save the W&B run id in the run's folder, for --resume."""
        write_whole(folder / WANDB, json.dumps({"project": self.project, "id": self.id}) + "\n")

    def write(self, step: int, numbers: dict[str, float], say: Callable[[str], None]) -> None:
        """Log the scalars of a step. If W&B fails, warn once with `say` and stop logging to it; training continues."""
        if self._run is None:
            return
        try:
            self._run.log({"step": step, **numbers})
        except Exception as error:  # an error in the package or service must not end a run of several days
            self._run = None
            say(f"Warning: logging to Weights & Biases stopped: {first_line(error)}. metrics.jsonl has all metrics.")

    def close(self, failed: bool) -> None:
        """Upload what is still pending, and mark the W&B run as finished or failed."""
        if self._run is not None:
            self._run.finish(exit_code=int(failed))


def check(config: TrainConfig) -> None:
    """Raise if --wandb is given and the package is not installed."""
    if config.wandb is not None:
        _package()


def _package() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise UsageError(
            f"--wandb needs the package wandb, which cannot be imported ({error}). Install it with "
            f"pip install 'striped-attention[wandb]', or leave out --wandb."
        ) from error
    return wandb


def _earlier(folder: pathlib.Path, project: str | None) -> str | None:
    """Return the W&B run id saved in this folder; None if there is none."""
    path = folder / WANDB
    if not path.exists():
        return None
    try:
        said = json.loads(path.read_text())
        there, number = said["project"], said["id"]
        if not (isinstance(there, str) and isinstance(number, str)):
            raise ValueError("project and id must be strings")
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UsageError(f"{path} is damaged ({error}). Move it away to log to a new run.") from error
    if there != project:
        raise UsageError(
            f"The run in {folder} logs to the project {there}; got --wandb {project}. Use --wandb {there}, or "
            f"move {path} away to log to a new run."
        )
    return number
