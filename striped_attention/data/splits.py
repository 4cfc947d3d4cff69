"""Splits: reject sources whose file names belong to several splits of a dataset, as named on the Hugging Face hub.

    data/train-00000-of-00002.parquet     test/0000.jsonl     c4-validation.00000-of-00008.json.gz

Training on all of them would include held-out data.
"""

import pathlib
import re
from collections.abc import Sequence

from striped_attention.errors import UsageError

NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}


def refuse_several(root: pathlib.Path, paths: Sequence[pathlib.Path]) -> None:
    """Raise if the names of files below `root` show that they belong to several splits."""
    found: dict[str, list[pathlib.Path]] = {}
    for path in paths:
        if (split := _split(path.relative_to(root))) is not None:
            found.setdefault(split, []).append(path)
    if len(found) < 2:
        return
    examples = ", ".join(f"{split} ({files[0].relative_to(root)})" for split, files in found.items())
    first = "train" if "train" in found else next(iter(found))
    raise UsageError(
        f"{root} holds several splits: {examples}. Give the files of one of them, like {_choice(root, found[first])}."
    )


def _split(path: pathlib.Path) -> str | None:
    """Return the split that a path names: its last run of letters that is the name of a split."""
    words = re.findall(r"[a-z]+", str(path).lower())
    return next((NAMES[word] for word in reversed(words) if word in NAMES), None)


def _choice(root: pathlib.Path, files: Sequence[pathlib.Path]) -> str:
    """Return what to pass for these files alone: their folder or a pattern."""
    path = files[0].relative_to(root)
    for folder in path.parents:
        if NAMES.get(folder.name.lower()) is not None:
            return str(root / folder)
    places = [m.end() for m in re.finditer(r"[A-Za-z]+", path.name) if m[0].lower() in NAMES]
    return f"'{root / path.parent / path.name[: places[-1]]}*' (with the quotes)"
