"""Build: tokenise a source into a store, with progress. Memory holds one long document or a batch of short ones."""

import concurrent.futures
import contextlib
import pathlib
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Mapping
from types import MappingProxyType

from striped_attention.data.columns import Document
from striped_attention.data.counts import Counts
from striped_attention.data.documents import documents
from striped_attention.data.encoder import Encoder
from striped_attention.data.files import Files
from striped_attention.data.interrupt import interruptible
from striped_attention.data.progress import Progress
from striped_attention.data.store import Writer
from striped_attention.errors import UsageError

Kept = Mapping[str, pathlib.Path]
Batches = Generator[list[Document], None, None]

PARTIAL = ".partial"  # suffix of the hidden, unique name of an incomplete folder
CHARACTERS, DOCUMENTS = 2**20, 2**12  # approximate limits of a batch that is tokenised together


def build(files: Files, encoder: Encoder, folder: pathlib.Path, kept: Kept = MappingProxyType({})) -> Counts:
    """Tokenise files into `folder`, which appears once complete on disk. `kept` maps file names to files to copy."""
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        for name, path in kept.items():
            shutil.copyfile(path, partial / name)
        counts = _write(files, encoder, partial)
        partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UsageError(
            f"The tokens of {files.source} cannot be written to {folder.parent}: {error.strerror or error}. Make room, "
            f"or choose another folder."
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return counts


def left_behind(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return incomplete versions of `folder`, left by killed processes or still being written."""
    name = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{8}}{re.escape(PARTIAL)}")
    return [path for path in folder.parent.glob(f".*{PARTIAL}") if name.fullmatch(path.name)]


def _write(files: Files, encoder: Encoder, folder: pathlib.Path) -> Counts:
    counts = Counts()
    with (
        interruptible() as check_interrupt,
        Progress(files) as progress,
        Writer(folder, encoder) as writer,
        contextlib.closing(_batches(files, encoder, counts, progress, check_interrupt)) as batches,
        concurrent.futures.ThreadPoolExecutor(1) as ahead,
    ):
        coming = ahead.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            check_interrupt()
            coming = ahead.submit(next, batches, None)
            writer.add(encoder.encode(batch), counts)
            progress.tokens = writer.tokens
        counts.check(files.source)
        writer.finish(files.source, counts)
    return counts


def _batches(
    files: Files, encoder: Encoder, counts: Counts, progress: Progress, check_interrupt: Callable[[], None]
) -> Batches:
    """Group documents into batches that are tokenised together."""
    batch: list[Document] = []
    characters = 0
    for file in files.files:
        with progress.file(file) as say:
            for document in documents(file, encoder.columns, encoder.template, counts, say):
                check_interrupt()
                batch.append(document)
                characters += len(document.text)
                if characters >= CHARACTERS or len(batch) >= DOCUMENTS:
                    yield batch
                    batch, characters = [], 0
    if batch:
        yield batch
