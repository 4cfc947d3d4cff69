"""Hooks of MkDocs: pages outside docs/, links to files of the repository, and a check that the site loads nothing.

Links in the sources are relative paths in the repository, as GitHub shows them. On the site, a link to a page leads to
that page, and a link to any other file, such as a result or a module, to a copy of it under `repository/`. A link to a
folder becomes its text.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/long_context.md": "examples/long_context.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"(\[[^\[\]]*\])\(([^()\s#]+)(#[^()\s]*)?\)")
LOADS = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages whose sources are outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links to files of the repository."""
    here = page.file.src_uri
    folder = posixpath.dirname(SOURCES.get(here, f"docs/{here}"))

    def rewrite(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if ":" in target or not (ROOT / path).exists():
            return link[0]  # on another server, or for MkDocs to report
        if (ROOT / path).is_dir():
            return text[1:-1]
        found = PAGES.get(path, path.removeprefix("docs/"))
        if found == path and files.get_file_from_path(path) is None:
            found = f"repository/{path}"
            if files.get_file_from_path(found) is None:
                files.append(File.generated(config, found, abs_src_path=str(ROOT / path)))
        return f"{text}({posixpath.relpath(found, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(rewrite, markdown)


def on_post_page(output: str, page: Any, config: Any) -> None:
    """Raise if a page loads anything from another server."""
    if found := LOADS.search(output):
        raise PluginError(f"{page.file.src_uri} loads {found[1]} from another server.")
