"""The command `striped report`: read, draw, write."""

import pathlib

from striped_attention.report.config import ReportConfig
from striped_attention.report.contents import Contents, gather
from striped_attention.report.page import render
from striped_attention.report.read import KNOWN, read
from striped_attention.report.style import drawing, entitle, save
from striped_attention.training.errors import UsageError


def run(config: ReportConfig) -> None:
    """Write the page, and the figures if asked for."""
    documents = read(config.paths)
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


def write_figures(contents: Contents, folder: pathlib.Path) -> None:
    """Every figure with its title on it, as PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    with drawing():
        for section in contents.sections:
            made = section.draw()
            entitle(made, section.title)
            save(made, folder, section.name)
