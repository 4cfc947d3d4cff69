"""Config: the options of `striped report`."""

import dataclasses
import pathlib
from typing import Annotated

import tyro

from striped_attention.training.config import Path
from striped_attention.training.errors import UsageError

RESULTS = pathlib.Path("benchmarks/results")
Paths = Annotated[tuple[pathlib.Path, ...], tyro.conf.arg(metavar="[PATH ...]", help_behavior_hint="")]


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """Draw what `striped bench` and `striped plan` have written: one HTML page that needs no network.

    Every figure says what it shows, for people who have not read the paper, and which file it was made from. Figures
    without data are left out; the page lists the commands that would make them.
    """

    results: tyro.conf.Positional[Paths] = ()
    """Result files, and folders of them. Default: benchmarks/results."""
    output: Annotated[pathlib.Path, tyro.conf.arg(metavar="PATH")] = pathlib.Path("report.html")
    """Where the page goes."""
    figures: Path = None
    """A folder that gets every figure as PNG and SVG too. Default: none."""

    def __post_init__(self) -> None:
        if self.output.is_dir():
            raise UsageError(f"--output must be a file, like report.html; got the folder {self.output}.")
        if self.figures is not None and self.figures.exists() and not self.figures.is_dir():
            raise UsageError(f"--figures must be a folder; got the file {self.figures}.")

    @property
    def paths(self) -> tuple[pathlib.Path, ...]:
        """What to read."""
        if self.results:
            return self.results
        if not RESULTS.is_dir():
            raise UsageError(
                f"There is no folder {RESULTS} here. Say which result files to draw: striped report FILE ..."
            )
        return (RESULTS,)
