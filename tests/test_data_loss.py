"""Tokens that count in the loss: spans of a text and answers of conversations, against simple references."""

import json

import numpy as np
import pytest
import tokenizers

from striped_attention import data
from striped_attention.data.chat import ChatTemplate
from striped_attention.errors import UsageError
from tests.test_data_sources import load, written

TEXTS = ["Ask: 2 + 2? Answer: vier (κατά λόγον).", "Nothing here counts.", "Everything does 🙂", "x"]
SPANS = [[[12, 20], [25, 36]], [], [[0, 17]], [[0, 0]]]

PLAIN = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message['content'] | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message['content'] | trim }}<|end|>\n{% endgeneration %}"
    "{%- else %}{{ message['content'] | trim }}<|end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALKS = [
    [("user", "hello"), ("assistant", " good morning "), ("user", "again?"), ("assistant", "καλημέρα")],
    [("system", "be brief"), ("user", "why?"), ("assistant", "because")],
    [("user", "nobody answers")],
]
TALKS = [[{"role": role, "content": content} for role, content in talk] for talk in TALKS]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level tokenizer like those of Llama 3 and Qwen."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(TEXTS, trainer)
    trained.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained.save(str(path))
    path.with_name("tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    return path


def with_template(tokenizer, folder, template):
    folder.mkdir(exist_ok=True)
    for path in tokenizer.parent.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return folder / "tokenizer.json"


def records(path, **columns):
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return written(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def test_spans_of_bytes_count(tmp_path):
    corpus = load(records(tmp_path / "x.jsonl", text=TEXTS, spans=SPANS), loss="spans")
    wanted = []
    for text, spans in zip(TEXTS, SPANS, strict=True):
        inside = [any(start <= i < end for start, end in spans) for i in range(len(text))]
        wanted += [inside[i] for i, character in enumerate(text) for _ in character.encode()] + inside[-1:]
    assert corpus.counted.tolist() == wanted
    (line,) = corpus.notes(1000)
    assert "of which count in the loss; 2 documents without a token that counts." in line


def test_spans_of_a_tokenizer_count(tmp_path, tokenizer):
    corpus = load(records(tmp_path / "x.jsonl", text=TEXTS, spans=SPANS), loss="spans", tokenizer=tokenizer)
    wanted, tokens = [], []
    for text, spans in zip(TEXTS, SPANS, strict=True):
        found = tokenizers.Tokenizer.from_file(str(tokenizer)).encode(text)
        inside = {i for start, end in spans for i in range(start, end)}
        wanted += [any(i in inside for i in range(*offset)) for offset in found.offsets] + [len(text) - 1 in inside]
        tokens += [*found.ids, 1]
    assert corpus.tokens.tolist() == tokens
    assert corpus.counted.tolist() == wanted


def test_the_weights_of_a_batch_are_those_of_its_targets(tmp_path):
    corpus = load(records(tmp_path / "x.jsonl", text=["abcd", "efgh"], spans=[[[1, 3]], [[0, 4]]]), loss="spans")
    batch = data.rows_in_order(corpus, 0, 1, 9)
    assert bytes(batch.targets[0].tolist()[:3]) == b"bcd"
    #                            a→b b→c c→d d→· ·→e e→f f→g g→h h→·
    assert batch.weights.tolist() == [[1, 1, 0, 0, 0, 1, 1, 1, 1]]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_answers_count_as_transformers_has_it(tmp_path, tokenizer, template):
    from transformers import PreTrainedTokenizerFast

    path = with_template(tokenizer, tmp_path / "t", template)
    corpus = load(records(tmp_path / "x.jsonl", messages=TALKS), chat="messages", tokenizer=path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<s>", eos_token="</s>")
    found = [
        theirs.apply_chat_template(talk, chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True)
        for talk in TALKS
    ]
    assert corpus.tokens.tolist() == [token for talk in found for token in talk["input_ids"]]
    assert corpus.counted.tolist() == [flag for talk in found for flag in talk["assistant_masks"]]
    assert corpus.starts.tolist() == np.cumsum([0, *(len(talk["input_ids"]) for talk in found)])[:-1].tolist()
    rendered = theirs.apply_chat_template(TALKS[0], chat_template=PLAIN, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate.beside(path).render(TALKS[0], add_generation_prompt=True) == rendered


def test_conversations_of_a_table_have_no_holes(tmp_path, tokenizer):
    """A table fills missing fields of messages with null; a template must see them as undefined."""
    import pyarrow.parquet

    template = PLAIN.replace("{{ message.role }}", "{{ message.role }}{{ 'tool' if message.tool is defined else '' }}")
    path = with_template(tokenizer, tmp_path / "t", template)
    talks = [TALKS[1], [{**message, "tool": "x"} for message in TALKS[2]]]
    pyarrow.parquet.write_table(pyarrow.table({"messages": talks}), tmp_path / "x.parquet")
    one = load(records(tmp_path / "x.jsonl", messages=talks), chat="messages", tokenizer=path)
    other = load(tmp_path / "x.parquet", chat="messages", tokenizer=path)
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.counted.tolist() == other.counted.tolist()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat_template.jinja beside .*tokenizer.json and no chat_template in tokenizer_config.json"),
        ("{% for %}", "chat_template.jinja is not valid Jinja"),
        ("{{ messages | length }} {{ messages }}", "answers cannot be located .*generation"),
        ("{{ raise_exception('no systems') }}", r"the chat template rejects it \(no systems\)"),
        ("{{ ''.__class__.__mro__ }}", r"the chat template rejects it \(access to attribute '__class__'.*unsafe\)"),
        ("{{ messages.append(1) }}", r"the chat template rejects it \(access to attribute 'append'.*unsafe\)"),
    ],
)
def test_templates_that_cannot_be_used_get_one_clear_line(tmp_path, tokenizer, template, message):
    path = with_template(tokenizer, tmp_path / "t", template or "")
    if template is None:
        (tmp_path / "t" / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match=message) as caught:
        load(records(tmp_path / "x.jsonl", messages=TALKS), chat="messages", tokenizer=path)
    assert "\n" not in str(caught.value)


def test_a_template_may_stand_in_the_tokenizers_config(tmp_path, tokenizer):
    path = with_template(tokenizer, tmp_path / "t", "")
    (tmp_path / "t" / "chat_template.jinja").unlink()
    for found in (PLAIN, [{"name": "tools", "template": ""}, {"name": "default", "template": PLAIN}]):
        (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "!", "chat_template": found}))
        assert ChatTemplate.beside(path).render(TALKS[2]) == "!<|user|>nobody answers<|end|>\n"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (dict(text=["abc"], spans=[[[0, 4]]]), r"the loss span \[0, 4\] is outside the text's 3 characters"),
        (dict(text=["abc"], spans=[[0, 1]]), r"the loss column is not a list of \[start, end\]"),
        (dict(text=["abc"], spans=[[[0.5, 1]]]), r"the loss span \[0.5, 1\] does not consist of integers"),
        (dict(text=["abc"], spans=[None]), "the loss column is not a list"),
        (dict(text=["abc"], spans=[[]]), "No token of .* counts in the loss"),
        (dict(text=["abc"]), "has no column 'spans'; its columns are text. Choose one with --loss-column"),
    ],
)
def test_loss_columns_that_make_no_sense_are_refused(tmp_path, columns, message):
    with pytest.raises(UsageError, match=message):
        load(records(tmp_path / "x.jsonl", **columns), loss="spans")


@pytest.mark.parametrize(
    ("talk", "message"),
    [
        ("hello", "the conversation is not a list of messages"),
        ([{"content": "hello"}], "a message of the conversation has no role"),
        ([{"role": "user", "content": "\U0010fff0"}], "it contains private-use characters"),
    ],
)
def test_conversations_that_are_none_are_refused(tmp_path, tokenizer, talk, message):
    path = with_template(tokenizer, tmp_path / "t", PLAIN)
    with pytest.raises(UsageError, match=message):
        load(records(tmp_path / "x.jsonl", messages=[talk]), chat="messages", tokenizer=path)
