"""Long context in a toy example: a model learns to recall over 256 tokens, then over 1,024.

    python examples/recall.py FOLDER

The beginning of a document gives every key a value, once. The rest asks for the values, in random order:

    C5 A3 E0 B3   ?A 3 . ?B 3 ?C 5 ?B 3 . ?E 0 ?A 3 ...

The model has one attention layer, so it can answer only by attending to the beginning, however far away that is. It is
trained on short documents, and then on long ones (`--start-from`, a longer `--length`, and a larger
`--rope-theta`, which by itself has most of the effect here, as the validation before the first step shows). `striped
evaluate` compares both models: loss by position, and needle in a haystack. Takes a minute.
"""

import json
import pathlib
import sys

import numpy as np
import tokenizers

from striped_attention.cli import main

KEYS, VALUES = "ABCDE", "01234567"
SHORT, LONG = 256, 1024
MODEL = "--layers 1 --dim 32 --ffn 64 --heads 2 --kv-heads 2 --vocabulary 56"
TRAINING = "--dtype float32 --learning-rate 1e-2 --schedule constant --warmup 10 --weight-decay 0"
# The needle uses a key that does not occur in the held-out documents.
NEEDLE = ["--needle", " {key}{value} ", "--question", " ?{key}", "--answer", " {value}", "--key-characters", KEYS[-1]]
NEEDLE += ["--key-length", "1", "--value-characters", VALUES, "--value-length", "1", "--draws", "16"]


def document(random: np.random.Generator, length: int, keys: str) -> str:
    """Make a document of about `length` tokens."""
    given = {key: random.choice(list(VALUES)) for key in random.permutation(list(keys))}
    words = [key + value for key, value in given.items()]
    while len(words) < length:
        key = random.choice(list(given))
        words += ["."] if random.random() < 0.1 else [f"?{key}", given[key]]
    return " ".join(words)


def write_texts(folder: pathlib.Path, count: int, length: int, seed: int, keys: str = "") -> None:
    """Write a folder of documents with `length` / 2 to `length` tokens, each with four of the five keys."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for number in range(count):
        chosen = keys or "".join(random.permutation(list(KEYS))[1:])
        text = document(random, int(random.integers(length // 2, length)), chosen)
        (folder / f"{number:04}.txt").write_text(text)


def write_tokenizer(path: pathlib.Path) -> None:
    """Write a tokenizer whose tokens are words."""
    words = [*(key + value for key in KEYS for value in VALUES), *(f"?{key}" for key in KEYS), *VALUES, "."]
    model = tokenizers.models.WordLevel(
        {word: i for i, word in enumerate([*words, "</s>", "[UNK]"])}, unk_token="[UNK]"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))


def striped(command: str, *more: str) -> None:
    """Run `striped`."""
    print(f"\n$ striped {command} {' '.join(map(repr, more))}", flush=True)
    if code := main([*command.split(), *more]):
        raise SystemExit(code)


def run(folder: pathlib.Path) -> None:
    write_texts(folder / "texts" / "short", 1200, SHORT, seed=0)
    write_texts(folder / "texts" / "long", 100, LONG, seed=1)
    write_texts(folder / "texts" / "held-out", 16, LONG, seed=2, keys=KEYS[:-1])
    write_tokenizer(folder / "tokenizer.json")
    short, long, held_out = folder / "short", folder / "long", f"{folder}/texts/held-out"
    cache = f"--data-cache {folder}/tokens"
    striped(
        f"train {MODEL} {TRAINING} --rope-theta 500 --data {folder}/texts/short --tokenizer {folder}/tokenizer.json "
        f"--length {SHORT} --batch 8 --steps 300 --checkpoint-dir {short} {cache}"
    )
    striped(
        f"train --start-from {short} {TRAINING} --rope-theta 10000 --data {folder}/texts/long "
        f"--length {LONG} --batch 2 --steps 60 --checkpoint-dir {long} --validation {held_out} {cache}"
    )
    for model in (short, long):
        striped(
            f"evaluate --model {model} --data {held_out} --length {LONG} --lengths {SHORT // 2} {LONG} "
            f"--depths 0 25 50 75 --batch 8 --dtype float32 --output {model}.json {cache}",
            *NEEDLE,
        )
    for model in (short, long):
        found = json.loads(pathlib.Path(f"{model}.json").read_text())
        far = found["perplexity"]["by_position"][-1]
        needles = [cell["correct"] / cell["draws"] for cell in found["needle"]["cells"] if cell["length"] == LONG]
        print(f"{model.name:5}: loss {far['loss']:.2f} from position {far['from']}, {np.mean(needles):.0%} of needles")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    run(pathlib.Path(sys.argv[1]))
