"""Cache of tokenised sources, keyed by their files, tokenizer and columns.

If several processes want the same source, on one machine or a shared disk, one tokenises it while the others wait for a
file lock. The operating system releases the lock if that process dies.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator

from striped_attention.data.build import build, left_behind
from striped_attention.data.corpus import Corpus
from striped_attention.data.encoder import Encoder
from striped_attention.data.files import Files
from striped_attention.data.progress import say
from striped_attention.data.store import FORMAT, open_store
from striped_attention.errors import UsageError


def default_folder() -> pathlib.Path:
    """Return the default cache folder."""
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(caches) / "striped_attention" / "tokens"


def open_or_build(files: Files, encoder: Encoder, cache: pathlib.Path | None = None) -> Corpus:
    """Return the corpus of a source, tokenising it if it is not in the cache."""
    key = key_of(files, encoder)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", pathlib.PurePath(files.source).name)[:60]
    folder = (cache or default_folder()) / f"{name}-{key}"
    if folder.exists():
        with contextlib.suppress(UsageError):  # a damaged store is rebuilt below, by one process
            return open_store(folder)[0]
    with _alone(folder):
        if folder.exists():
            try:
                return open_store(folder)[0]
            except UsageError:
                say(f"{folder} is damaged and will be rebuilt.")
                shutil.rmtree(folder)
        for path in left_behind(folder):  # by killed processes: this one holds the lock
            shutil.rmtree(path, ignore_errors=True)  # another user's cannot be removed
        build(files, encoder, folder)
        if key_of(files, encoder) != key:
            shutil.rmtree(folder)
            raise UsageError(f"{files.source} changed while it was being tokenised. Start again once it is final.")
        return open_store(folder)[0]


def key_of(files: Files, encoder: Encoder) -> str:
    """Return the cache key: a hash of everything that determines the tokens."""
    try:
        stats = [(file, file.path.stat()) for file in files.files]
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}.") from error
    template = encoder.template
    said = [
        FORMAT,
        [(str(file.path.absolute()), file.kind, file.packed, stat.st_size, stat.st_mtime_ns) for file, stat in stats],
        [encoder.identity, encoder.end, encoder.vocabulary],
        [encoder.columns.main, encoder.columns.loss, encoder.columns.chat],
        None if template is None else [template.text, template.tokens],
    ]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _alone(folder: pathlib.Path) -> Iterator[None]:
    """Hold the lock of a folder, so that only one process builds it."""
    path = folder.with_name(folder.name + ".lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    except OSError as error:
        raise UsageError(
            f"The token cache {folder.parent} cannot be used: {error.strerror}. Choose a writable folder with "
            f"--data-cache."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Another process is tokenising the same data; waiting for it ({path}).")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise UsageError(
                f"{path} cannot be locked ({error.strerror}), so several processes could write at once. Choose "
                f"another file system with --data-cache, or use striped tokenize."
            ) from error
        yield
