"""Start: what a run begins with. Fresh weights, a model that was trained before, or the run's own checkpoints.

Of a model (`--start-from`) the weights, the shape, the vocabulary and the tokenizer are taken. What `striped generate`
and `striped export` need of its folder later is kept in the run's: the ids of special tokens in every checkpoint, and
copies of the tokenizer and of generation_config.json. So a run that goes on no longer needs the folder that it started
from; only one that was interrupted before its first checkpoint starts from it again.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from striped_attention.data import Named, need_tokenizer
from striped_attention.errors import UsageError
from striped_attention.huggingface.writing import BESIDE, GENERATION
from striped_attention.models.llama import ModelConfig
from striped_attention.training import arrays, rope
from striped_attention.training.config import TrainConfig
from striped_attention.training.folder import TOKENIZER, read_record
from striped_attention.training.source import NoTokenizer, Source, find

RECORDED = ("start_from", "rope_theta", "rope_scaling")  # options that a run goes on with, given again or not


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run begins. `config` knows the model now; `source` is None if no weights are read from elsewhere.

    `positions` is the longest sequence that the model's rotary positions are made for, as far as that is known, `ids`
    are the special tokens that the model names, and `files` what is to be copied into the run's folder, by name.
    """

    config: TrainConfig
    source: Source | None = None
    positions: int | None = None
    ids: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: Mapping[str, pathlib.Path] = dataclasses.field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """What a person should know of the start before the run begins."""
        config, said = self.config, []
        if self.source is not None:
            step = "" if self.source.step is None else f", step {self.source.step}"
            said.append(f"Starts from {config.start_from}{step}: {rope.describe(config.model, config.sequence_length)}")
        elif config.start_from is None and (config.rope_scaling is not None or config.rope_theta is not None):
            said.append(f"From scratch: {rope.describe(config.model, config.sequence_length)}")
        if self._too_long:
            said.append(
                f"Warning: --sequence-length {config.sequence_length} is longer than the {self.positions} positions "
                f"that the model is made for. Scale them with --rope-scaling, or take a larger --rope-theta."
            )
        return said

    @property
    def _too_long(self) -> bool:
        """Whether sequences are longer than the positions, and no larger theta was asked for to make up for it."""
        raised = self.source is not None and self.config.model.rope_theta > self.source.model.rope_theta
        return self.positions is not None and self.config.sequence_length > self.positions and not raised


def look(config: TrainConfig) -> Start:
    """Find what a run begins with. Reads no weight and writes nothing; raises UsageError for what cannot be."""
    run = _last_run(config)
    if run is not None:
        config = _with_recorded(config, run)
        if config.start_from is not None and _has_checkpoint(config.checkpoint_dir):
            return _going_on(config, run)
    if config.start_from is not None:
        return _starting(config, find(config.start_from, "--start-from"))
    return Start(config, positions=rope.reach(config.model.stretch))


def _last_run(config: TrainConfig) -> dict[str, Any] | None:
    """What run.json says of the run that is to go on."""
    if not config.resume or config.checkpoint_dir is None or not config.checkpoint_dir.is_dir():
        return None  # refused later, if it is wrong
    runs = read_record(config.checkpoint_dir)
    return runs[-1] if runs else None


def _has_checkpoint(folder: pathlib.Path | None) -> bool:
    return folder is not None and any(path.name.isdecimal() for path in folder.iterdir())


def _with_recorded(config: TrainConfig, run: dict[str, Any]) -> TrainConfig:
    """The options with those of the run's start, which need not be given again. Other ones are refused."""
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
                f"The run in {config.checkpoint_dir} was started {how}; got {asked}. Leave {flag} out to go on with "
                f"it, or start a new run in another folder."
            )
    return dataclasses.replace(config, **there)


def _same(asked: Any, before: Any) -> bool:
    """Whether an option is what it was; a folder may be written in another way."""
    if isinstance(asked, pathlib.Path) and isinstance(before, pathlib.Path):
        return asked.resolve() == before.resolve()
    return bool(asked == before)


def _going_on(config: TrainConfig, run: dict[str, Any]) -> Start:
    """A run that has checkpoints, of the model that its record names; they say the ids and positions."""
    folder = config.checkpoint_dir
    assert folder is not None
    try:
        model = ModelConfig.from_json(run["model"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{folder / 'run.json'} holds a model that this version does not know: {error}.") from error
    own = folder / TOKENIZER
    return Start(dataclasses.replace(config, shape=model, own_tokenizer=own if own.is_file() else None))


def _starting(config: TrainConfig, source: Source) -> Start:
    model, positions = _stretched(config, source)
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


def _stretched(config: TrainConfig, source: Source) -> tuple[ModelConfig, int | None]:
    """The source's model with the rope options, and the longest sequence that its positions are then made for."""
    model, before = source.model, source.model.stretch
    positions: int | None = source.positions
    if config.rope_theta is not None:
        model = dataclasses.replace(model, rope_theta=config.rope_theta)
    if config.rope_scaling is not None:
        original = source.length if before is None else before.original_length
        model = rope.scaled(model, config.rope_scaling, original)
        positions = original if model.stretch is None else rope.reach(model.stretch)
        if positions is None and before is not None:
            # Files give the length before or after a linear scaling; with either the model is made for this or more.
            more = 1.0 if model.stretch is None else model.stretch.factor / before.factor
            positions = round(source.length * max(1.0, more))
    return model, positions


def _own_tokenizer(config: TrainConfig, source: Source) -> pathlib.Path | None:
    """The source's tokenizer, if there is one. Raises if there is none and text has to be turned into tokens."""
    if config.tokenizer is not None:
        return None
    try:
        own = source.tokenizer
    except NoTokenizer as error:
        given: list[Named] = [config.data] if config.validation is None else [config.data, config.validation]
        if any(map(need_tokenizer, given)):
            raise UsageError(
                f"--start-from {source.folder} has no {TOKENIZER}, so its tokens for text are not known. Give it with "
                f"--tokenizer, or data as tokens."
            ) from error
        return None
    if own is not None and not config.dry_run:
        source.check_tokenizer(own)
    return own
