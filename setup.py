"""Adds the description for PyPI, where links to files of this repository lead nowhere: they become plain text."""

import pathlib
import re

import setuptools


def description(readme: str) -> str:
    """Return the README without figures, and without links, of this repository."""
    here = r"\((?!https?://|#)[^)]*\)"
    return re.sub(rf"\[([^\[\]]*)\]{here}", r"\1", re.sub(rf"!\[[^\[\]]*\]{here}\n*", "", readme))


setuptools.setup(
    long_description=description(pathlib.Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
