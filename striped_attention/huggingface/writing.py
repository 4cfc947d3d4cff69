"""Writing: write a model as a Hugging Face folder, for transformers and compatible libraries. All of it or nothing.

Weights are written one at a time, in any order (`stream`). The safetensors library's own writer needs all weights of a
file in memory, 5 GB; this one needs one weight.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from striped_attention.errors import UsageError
from striped_attention.huggingface import stream
from striped_attention.huggingface.config import config_json
from striped_attention.huggingface.weight import CODES, Named, Weight, by_key, weights
from striped_attention.models.config import ModelConfig

DTYPES = {name: stream.DTYPES[code] for name, code in CODES.items()}
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")  # files beside a tokenizer.json
GENERATION = "generation_config.json"  # the sampling defaults and end-of-text tokens of a model

Place = tuple[Weight, pathlib.Path, int]  # a weight, its file, and the byte offset of its values


def write(
    folder: pathlib.Path,
    config: ModelConfig,
    named: Iterable[Named],
    dtype: str,
    tokenizer: pathlib.Path | None = None,
    *,
    length: int,
    ids: Mapping[str, int | list[int]] | None = None,
    generation: pathlib.Path | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a model into a folder that is new or empty.

    `named` has the form that `tensors` yields, in any order and any float dtype. `length` is the model's maximum
    sequence length. `ids` may have bos_token_id, eos_token_id and pad_token_id; `generation` is a
    generation_config.json to copy. A file has at most `shard_bytes`, or one weight.
    """
    if dtype not in CODES:
        raise UsageError(f"Models can be written in {', '.join(CODES)}; got {dtype!r}.")
    if tokenizer is not None and not tokenizer.is_file():
        raise UsageError(f"The tokenizer {tokenizer} is not a file. Give a Hugging Face tokenizer.json.")
    said = config_json(config, dtype, length, ids or {})
    size = config.parameters * DTYPES[dtype].itemsize
    with _whole(folder, size) as temporary:
        shards = _shards(config, dtype, shard_bytes)
        places = {(p[0].name, p[0].layer): p for name in shards for p in _begin(temporary / name, shards[name], dtype)}
        for name, layer, array in named:
            if (name, layer) not in places:
                raise ValueError(f"{name} of layer {layer} was given twice, or does not belong to the model.")
            _put(places.pop((name, layer)), array, dtype)
        if places:
            raise ValueError(f"{len(places)} weights of the model are missing, among them {min(map(str, places))}.")
        if len(shards) > 1:
            files = {weight.key: name for name, shard in shards.items() for weight in shard}
            index = {"metadata": {"total_size": size}, "weight_map": files}
            (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        (temporary / "config.json").write_text(json.dumps(said, indent=2) + "\n")
        if generation is not None:
            shutil.copyfile(generation, temporary / GENERATION)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, temporary / "tokenizer.json")
            for path in filter(pathlib.Path.is_file, map(tokenizer.with_name, BESIDE)):
                shutil.copyfile(path, temporary / path.name)


@contextlib.contextmanager
def _whole(folder: pathlib.Path, size: int) -> Iterator[pathlib.Path]:
    """Yield a temporary folder for `size` bytes. It is renamed to `folder` on success and removed on failure."""
    target = pathlib.Path(os.path.realpath(folder))
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{folder} exists and is not empty. Choose a folder that is new or empty.")
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < size:
            raise OSError(f"it needs {size / 1e6:,.1f} MB and the disk has {free / 1e6:,.1f} MB left")
        temporary.mkdir()
        yield temporary
        temporary.replace(target)
    except OSError as error:
        raise UsageError(
            f"The model could not be written to {folder}: {error.strerror or error}. Nothing was kept. Make room "
            f"or choose another folder."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _shards(config: ModelConfig, dtype: str, most: int) -> dict[str, list[Weight]]:
    """Assign weights to files, layer by layer; the parts of a fused matrix stay together."""
    outside = {"embedding": -1, "norm": config.layers, "unembedding": config.layers}
    shards: list[list[Weight]] = [[]]
    for some in by_key(sorted(weights(config), key=lambda w: outside[w.name] if w.layer is None else w.layer)):
        if shards[-1] and _bytes([*shards[-1], *some], dtype) > most:
            shards.append([])
        shards[-1] += some
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def _bytes(shard: list[Weight], dtype: str) -> int:
    return sum(math.prod(weight.shape) for weight in shard) * DTYPES[dtype].itemsize


def _begin(path: pathlib.Path, shard: list[Weight], dtype: str) -> list[Place]:
    """Write the header of a file and return the place of every weight."""
    groups = by_key(shard)
    starts = stream.begin(path, {some[0].key: (CODES[dtype], some[0].stored) for some in groups}, {"format": "pt"})
    places: list[Place] = []
    for some in groups:
        start = starts[some[0].key]
        for weight in some:  # in the order of their rows
            places.append((weight, path, start))
            start += _bytes([weight], dtype)
    return places


def _put(place: Place, array: np.ndarray, dtype: str) -> None:
    """Write one weight at its place."""
    weight, path, start = place
    array = np.asarray(array)
    if array.shape != weight.shape:
        raise ValueError(f"{weight.name} must have the shape {weight.shape}; got {array.shape}.")
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(weight.theirs(array)).astype(DTYPES[dtype], copy=False)
    if dtype == "float16" and np.isinf(stored).any():
        raise UsageError(f"{weight.key} has values beyond 65504, the largest float16. Choose bfloat16 or float32.")
    stream.put(path, start, stored)
