"""examples/long_context.md, verbatim: its commands, run with a small model and dataset, and its planned costs."""

import json
import pathlib
import random
import re
import shlex

import numpy as np
import pytest

import striped_attention as sa
from striped_attention import cli
from striped_attention.core.mask import packed
from tests.test_huggingface import libraries

RECIPE = (pathlib.Path(__file__).parent.parent / "examples" / "long_context.md").read_text()
MODEL, LENGTH, BEFORE = "Meta-Llama-3-8B", 131_072, 8_192
FETCHED = ["pip", "hf"]  # programs that download; the tests provide the files

# Sizes in the recipe: sizes in the tests, as words of a command, replaced in this order.
TOY = {
    "--length 128k": "--length 4k",
    "131072": "512",
    "8192 32768 512": "256 512",
    "--mesh sequence=8": "--mesh data=4,sequence=2",
    "--batch 8 --accumulate 8": "--batch 8 --accumulate 2",
    "--steps 1000 --warmup 50": "--steps 4 --warmup 1",
    "--validate-every 100 --checkpoint-every 50": "--validate-every 2 --validation-sequences 4 --checkpoint-every 2",
    "striped evaluate": "striped evaluate --sequences 4 --batch 4 --draws 2 --depths 0 100",
}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", RECIPE, flags=re.DOTALL)


def commands():
    """Return the commands of the recipe, one string each."""
    text = "".join(blocks("bash")).replace("\\\n", " ")
    return [re.sub(r" +", " ", line).strip() for line in text.splitlines()]


def small(command):
    for size, toy in TOY.items():
        command = command.replace(size, toy)
    return command


def planned(devices, hardware, mask):
    """Return the figures of a table row: memory in bytes, and tokens/s and hours for 1,000 steps of 8 sequences.

    Rates and hours are rounded to two digits, because a plan is no more precise.
    """
    batch = 1 if devices == 8 else 8
    found = sa.plan(devices, LENGTH, mask=mask, hardware=hardware, batch=batch).fastest
    speed = batch * LENGTH / found.step_seconds
    return sum(found.memory.values()), f"{float(f'{speed:.2g}'):,.0f}", f"{1000 * 8 * LENGTH / speed / 3600:.2g}"


def test_the_planned_costs():
    table = RECIPE.split("<!-- costs: planned by tests/test_recipe.py -->\n")[1].split("\n\n")[0]
    _, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    assert [row[0] for row in rows] == ["8 × H100", "8 × H200", "64 × H100", "64 × H200"]
    for where, *shown in rows:
        devices, hardware = int(where.split()[0]), where.split()[-1].lower()
        memory, *causal = planned(devices, hardware, None)
        more, *documents = planned(devices, hardware, packed(LENGTH, 32_768))
        assert shown == [f"{max(memory, more) / 1e9:.0f} GB", *causal, *documents]


@pytest.fixture
def kitchen(tmp_path, monkeypatch):
    """A folder with what the recipe downloads: a tiny transformers model with a tokenizer, and documents."""
    monkeypatch.chdir(tmp_path)
    torch, transformers = libraries()
    documents = written(tmp_path / "text")
    vocabulary = write_tokenizer(tmp_path / MODEL, documents)
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, max_position_embeddings=512 * BEFORE // LENGTH, vocab_size=vocabulary)
    shape |= dict(bos_token_id=0, eos_token_id=1, rope_theta=500_000.0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).save_pretrained(tmp_path / MODEL)
    return tmp_path


def written(folder):
    """Write documents of random words, some longer than a sequence, for training and validation; return the latter."""
    rng = random.Random(0)
    words = re.findall(r"\w+", "The moral of this story is that a secret number hides in long text")
    folder.mkdir()
    for name, count in (("train", 40), ("held-out", 12)):
        lines = [" ".join(rng.choices(words, k=rng.choice((50, 200, 900)))) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return lines


def write_tokenizer(folder, documents):
    """Write a byte-level BPE tokenizer with few merges, like Llama 3's; return its vocabulary size."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = dict(bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")
    kind = dict(tokenizer_class="PreTrainedTokenizerFast")
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, **kind}))
    return tokenizer.get_vocab_size()


def test_every_command_of_the_recipe_runs(kitchen, capsys):
    run = []
    for command in commands():
        program, *arguments = shlex.split(small(command))
        if program in FETCHED:
            continue
        assert program == "striped"
        assert cli.main(arguments) == 0, (command, capsys.readouterr())
        run.append(arguments[0])
    assert run == ["tokenize"] * 2 + ["plan", "train", "train", "evaluate", "evaluate", "report", "export"]
    out = capsys.readouterr().out
    for said in ("documents", "Best: --strategy", "memory per device", "validation loss", "All 4 steps are done."):
        assert said in out
    for name in ("before.json", "after.json"):
        found = json.loads((kitchen / name).read_text())
        assert np.isfinite(found["perplexity"]["loss"])
        assert {cell["length"] for cell in found["needle"]["cells"]} == {256, 512}
    assert "<svg" in (kitchen / "report.html").read_text()
    (python,) = blocks("python")
    exec(python.replace("131072", "512"), {})
    assert "The moral of this story is" in capsys.readouterr().out


def test_the_sizes_that_are_made_smaller_are_all_there():
    text = "\n".join(commands())
    for size, toy in TOY.items():
        assert size in text
        text = text.replace(size, toy)
