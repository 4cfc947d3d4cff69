"""The command `striped report`: read results, draw figures, write the page."""

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
    """Draw the results of `striped bench`, `compile`, `plan`, `train` and `evaluate` on one self-contained HTML page.

    Every figure has a caption that explains it without knowledge of the paper, and names its result files. Figures
    without data are left out; the page lists the commands that produce the data.
    """

    results: tyro.conf.Positional[Paths] = ()
    """Result files, folders of result files, or run folders of `striped train`. Default: benchmarks/results."""
    output: Annotated[pathlib.Path, tyro.conf.arg(metavar="PATH")] = pathlib.Path("report.html")
    """Path of the HTML page."""
    plans: bool = False
    """Also draw what is planned, not measured: counted work, and planned timelines, speed-ups and tokens per second.
    Without PATH it is always drawn, as are files of `striped plan`."""
    figures: Path = None
    """Folder to which every figure is also written as PNG and SVG. Default: none."""

    def __post_init__(self) -> None:
        if self.output.is_dir():
            raise UsageError(f"--output must be a file, e.g. report.html; got the folder {self.output}.")
        if self.figures is not None and self.figures.exists() and not self.figures.is_dir():
            raise UsageError(f"--figures must be a folder; got the file {self.figures}.")


def run(config: ReportConfig) -> None:
    """Write the page, and the figures if asked for."""
    # Imported late: matplotlib is slow to import, and no other command needs it.
    from striped_bench.report.contents import gather
    from striped_bench.report.page import render
    from striped_bench.report.read import KNOWN, read

    if not config.results and not RESULTS.is_dir():
        raise UsageError(f"There is no folder {RESULTS} here. Name the result files to draw: striped report FILE ...")
    documents = read(config.results or [RESULTS])
    if all(document.benchmark not in KNOWN for document in documents):
        names = ", ".join(sorted({repr(document.benchmark) for document in documents}))
        raise UsageError(f"There is nothing to draw: no figure uses results of {names}. Known: {', '.join(KNOWN)}.")
    contents = gather(documents, plans=config.plans or not config.results)
    if not contents.sections:
        raise UsageError("There is nothing to draw: no figure has enough results. --plans also draws what is planned.")
    try:
        config.output.parent.mkdir(parents=True, exist_ok=True)
        config.output.write_text(render(contents))
        if config.figures is not None:
            write_figures(contents, config.figures)
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be written: {error.strerror}. Choose another place.") from error
    left_out = f", {len(contents.missing)} left out for lack of results" if contents.missing else ""
    print(f"{config.output}: {len(contents.sections)} figures from {len(documents)} files{left_out}")


def write_figures(contents: Any, folder: pathlib.Path) -> None:
    """Write every figure, with its title, as PNG and SVG."""
    from striped_bench.report.style import drawing, save

    folder.mkdir(parents=True, exist_ok=True)
    with drawing():
        for section in contents.sections:
            save(section.draw(), folder, section.name, section.title)
