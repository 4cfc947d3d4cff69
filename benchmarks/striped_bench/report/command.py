"""The command `striped report`: read, draw, write."""

import dataclasses
import pathlib
from typing import Annotated, Any

import tyro

from striped_attention.errors import UsageError
from striped_attention.options import Path

RESULTS = pathlib.Path("benchmarks/results")
Paths = Annotated[tuple[pathlib.Path, ...], tyro.conf.arg(metavar="[PATH ...]", help_behavior_hint="")]


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """Draw what `striped bench`, `plan`, `train` and `evaluate` have written: one HTML page that needs no network.

    Every figure says what it shows, for people who have not read the paper, and which file it was made from. Figures
    without data are left out; the page lists the commands that would make them.
    """

    results: tyro.conf.Positional[Paths] = ()
    """Result files, folders of them, and folders of runs of `striped train`. Default: benchmarks/results."""
    output: Annotated[pathlib.Path, tyro.conf.arg(metavar="PATH")] = pathlib.Path("report.html")
    """Where the page goes."""
    figures: Path = None
    """A folder that gets every figure as PNG and SVG too. Default: none."""

    def __post_init__(self) -> None:
        if self.output.is_dir():
            raise UsageError(f"--output must be a file, like report.html; got the folder {self.output}.")
        if self.figures is not None and self.figures.exists() and not self.figures.is_dir():
            raise UsageError(f"--figures must be a folder; got the file {self.figures}.")


def run(config: ReportConfig) -> None:
    """Write the page, and the figures if asked for."""
    # matplotlib takes its time, and no other command needs it.
    from striped_bench.report.contents import gather
    from striped_bench.report.page import render
    from striped_bench.report.read import KNOWN, read

    if not config.results and not RESULTS.is_dir():
        raise UsageError(f"There is no folder {RESULTS} here. Say which result files to draw: striped report FILE ...")
    documents = read(config.results or [RESULTS])
    if all(document.benchmark not in KNOWN for document in documents):
        names = ", ".join(sorted({repr(document.benchmark) for document in documents}))
        raise UsageError(f"There is nothing to draw: no figure is made from {names}. Known: {', '.join(KNOWN)}.")
    contents = gather(documents)
    try:
        config.output.parent.mkdir(parents=True, exist_ok=True)
        config.output.write_text(render(contents))
        if config.figures is not None:
            write_figures(contents, config.figures)
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be written: {error.strerror}. Choose another place.") from error
    left_out = f", {len(contents.missing)} left out for want of results" if contents.missing else ""
    print(f"{config.output}: {len(contents.sections)} figures from {len(documents)} files{left_out}")


def write_figures(contents: Any, folder: pathlib.Path) -> None:
    """Every figure with its title on it, as PNG and SVG."""
    from striped_bench.report.style import drawing, save

    folder.mkdir(parents=True, exist_ok=True)
    with drawing():
        for section in contents.sections:
            save(section.draw(), folder, section.name, section.title)
