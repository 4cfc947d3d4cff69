"""Start: the initial state of a run: fresh weights, an existing model, or the run's own checkpoints.

`--start-from` provides the weights, shape, vocabulary and tokenizer. Everything that `striped generate` and `striped
export` need later is copied into the run: the special token ids into every checkpoint, the tokenizer and
generation_config.json into its folder. A resumed run therefore no longer needs the folder it started from, unless it
was interrupted before its first checkpoint.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from striped_attention.data import Named, kept_tokenizer, need_tokenizer
from striped_attention.data.tokenizer import open_tokenizer, tokens_of
from striped_attention.errors import UsageError
from striped_attention.huggingface.writing import BESIDE, GENERATION
from striped_attention.models.config import ModelConfig
from striped_attention.options import OF_A_START
from striped_attention.training import arrays, rope
from striped_attention.training.config import TrainConfig
from striped_attention.training.folder import TOKENIZER, read_record
from striped_attention.training.source import NoTokenizer, Source, find

ROUND = 128  # the vocabulary is a multiple of it: matrix units compute in tiles
RECORDED = ("start_from", "rope_theta", "rope_scaling")  # options that a resumed run keeps, given again or not


@dataclasses.dataclass(frozen=True)
class Start:
    """The start of a run. `config` includes the model; `source` is None unless weights are read from another folder.

    `positions` is the longest sequence that the model's rotary positions support, if known. `ids` are the model's
    special tokens. `files` are the files to copy into the run's folder, by name. `changes` are options of a resumed run
    that differ from those in its run.json.
    """

    config: TrainConfig
    source: Source | None = None
    positions: int | None = None
    ids: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: Mapping[str, pathlib.Path] = dataclasses.field(default_factory=dict)
    changes: Sequence[str] = ()

    @property
    def lines(self) -> list[str]:
        """Lines for the user on changed options, the model and its positions, printed before the run begins."""
        config = self.config
        said = [f"Changed since the last start: {', '.join(self.changes)}."] if self.changes else []
        if self.source is not None:
            step = "" if self.source.step is None else f", step {self.source.step}"
            said.append(f"Starts from {config.start_from}{step}: {rope.describe(config.model, config.sequence_length)}")
        elif config.start_from is None and (config.rope_scaling is not None or config.rope_theta is not None):
            said.append(f"From scratch: {rope.describe(config.model, config.sequence_length)}")
        if self._too_long:
            said.append(
                f"Warning: --length {config.sequence_length} is longer than the {self.positions} positions "
                f"that the model supports. Scale them with --rope-scaling, or use a larger --rope-theta."
            )
        return said

    @property
    def _too_long(self) -> bool:
        """Whether sequences exceed the model's positions and no larger theta makes up for it."""
        raised = self.source is not None and self.config.model.rope_theta > self.source.model.rope_theta
        return self.positions is not None and self.config.sequence_length > self.positions and not raised


def look(config: TrainConfig) -> Start:
    """Find what a run starts from. Reads no weights and writes nothing. Raises UsageError if the start is invalid."""
    run = _last_run(config)
    config = _with_vocabulary(config, run)
    if run is not None:
        return dataclasses.replace(_resumed(config, run), changes=_changes(config, run))
    return _begun(config)


def _with_vocabulary(config: TrainConfig, run: dict[str, Any] | None) -> TrainConfig:
    """Set the vocabulary of a model from scratch to that of its tokenizer, unless --vocabulary is given."""
    if config.vocabulary is not None or config.start_from is not None:
        return config
    if run is not None:
        return dataclasses.replace(config, vocabulary=run.get("options", {}).get("vocabulary"))
    tokenizer = config.tokenizer or kept_tokenizer(config.data)
    if tokenizer is None:
        return config
    needed = tokens_of(open_tokenizer(tokenizer))
    return dataclasses.replace(config, vocabulary=-(-needed // ROUND) * ROUND)


def _resumed(config: TrainConfig, run: dict[str, Any]) -> Start:
    config = _with_recorded(config, run)
    if config.start_from is not None and _has_checkpoint(config.checkpoint_dir):
        return _going_on(config, run)
    return _begun(config)


def _changes(config: TrainConfig, run: dict[str, Any]) -> list[str]:
    """Return the options that differ from those in run.json, and what they were."""
    before, now = run.get("options", {}), json.loads(json.dumps(config.record()))
    names = [name for name in now if name in before and name not in (*OF_A_START, *RECORDED)]
    return [
        f"--{name.removeprefix('sequence_').replace('_', '-')} {now[name]} (before: {before[name]})"
        for name in names
        if now[name] != before[name]
    ]


def _begun(config: TrainConfig) -> Start:
    if config.start_from is not None:
        return _starting(config, find(config.start_from, "--start-from"))
    return Start(config, positions=rope.reach(config.model.rope_scaling))


def _last_run(config: TrainConfig) -> dict[str, Any] | None:
    """Return the last record in run.json, of the run to resume; None if there is none."""
    if not config.resume or config.checkpoint_dir is None or not config.checkpoint_dir.is_dir():
        return None  # `folder.check` raises later if needed
    runs = read_record(config.checkpoint_dir)
    return runs[-1] if runs else None


def _has_checkpoint(folder: pathlib.Path | None) -> bool:
    return folder is not None and any(path.name.isdecimal() for path in folder.iterdir())


def _with_recorded(config: TrainConfig, run: dict[str, Any]) -> TrainConfig:
    """Add the recorded start options, which need not be given again. Raises if different ones are given."""
    options = run.get("options", {})
    there = {name: options.get(name) for name in RECORDED}
    if there["start_from"] is None and config.start_from is None:
        return config
    if there["start_from"] is not None:
        there["start_from"] = pathlib.Path(there["start_from"])
    for name, before in there.items():
        asked = getattr(config, name)
        if asked is not None and not _same(asked, before):
            flag = f"--{name.replace('_', '-')}"
            how = f"without {flag}" if before is None else f"with {flag} {before}"
            raise UsageError(
                f"The run in {config.checkpoint_dir} was started {how}; got {asked}. Leave {flag} out to continue "
                f"it, or start a new run in another folder."
            )
    return dataclasses.replace(config, **there)


def _same(asked: Any, before: Any) -> bool:
    """Whether an option is unchanged. Paths are equal if they lead to the same folder."""
    if isinstance(asked, pathlib.Path) and isinstance(before, pathlib.Path):
        return asked.resolve() == before.resolve()
    return bool(asked == before)


def _going_on(config: TrainConfig, run: dict[str, Any]) -> Start:
    """Resume a run that has checkpoints. Its record gives the model; the checkpoints give ids and positions."""
    folder = config.checkpoint_dir
    assert folder is not None
    try:
        model = ModelConfig.from_json(run["model"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{folder / 'run.json'} holds a model that this version does not support: {error}.") from error
    own = folder / TOKENIZER
    return Start(dataclasses.replace(config, shape=model, own_tokenizer=own if own.is_file() else None))


def _starting(config: TrainConfig, source: Source) -> Start:
    model, positions = _with_rope(config, source)
    if not config.dry_run:
        arrays.check(source)
    own = _own_tokenizer(config, source)
    if config.tokenizer is not None:
        source.check_tokenizer(config.tokenizer)
    files = {} if config.tokenizer is not None else {name: source.file(name) for name in (TOKENIZER, *BESIDE)}
    files[GENERATION] = source.file(GENERATION)
    return Start(
        dataclasses.replace(config, shape=model, own_tokenizer=own),
        source,
        positions,
        source.ids,
        {name: path for name, path in files.items() if path is not None},
    )


def _with_rope(config: TrainConfig, source: Source) -> tuple[ModelConfig, int | None]:
    """Apply the rope options to the source's model. Also return the longest sequence that its positions then
    support."""
    model, before = source.model, source.model.rope_scaling
    positions: int | None = source.positions
    if config.rope_theta is not None:
        model = dataclasses.replace(model, rope_theta=config.rope_theta)
    if config.rope_scaling is not None:
        original = source.length if before is None else before.original_length
        model = rope.scaled(model, config.rope_scaling, original)
        positions = original if model.rope_scaling is None else rope.reach(model.rope_scaling)
        if positions is None and before is not None:
            # Files give the length before or after a linear scaling. In both cases the model supports at least this.
            more = 1.0 if model.rope_scaling is None else model.rope_scaling.factor / before.factor
            positions = round(source.length * max(1.0, more))
    return model, positions


def _own_tokenizer(config: TrainConfig, source: Source) -> pathlib.Path | None:
    """Return the source's tokenizer, if there is one. Raises if there is none and the data is text."""
    if config.tokenizer is not None:
        return None
    try:
        own = source.tokenizer
    except NoTokenizer as error:
        given: list[Named] = [config.data] if config.validation is None else [config.data, config.validation]
        if any(map(need_tokenizer, given)):
            raise UsageError(
                f"--start-from {source.folder} has no {TOKENIZER}, so text cannot be tokenised. Give its tokenizer "
                f"with --tokenizer, or give tokenised data."
            ) from error
        return None
    if own is not None and not config.dry_run:
        source.check_tokenizer(own)
    return own
