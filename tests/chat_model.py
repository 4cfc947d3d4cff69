"""A toy chat model as a Hugging Face folder, with one token per character, and its reference implementation."""

import functools
import json
import pathlib
import string

import numpy as np

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<unk>", "<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
LETTERS = string.ascii_letters + string.digits + string.punctuation + " \n"


def write_model(folder: pathlib.Path) -> pathlib.Path:
    """Write a model with random weights that never generates special tokens, and a tokenizer that prepends <s>."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **dict(vocab_size=len(SPECIAL) + len(LETTERS), hidden_size=32, intermediate_size=48, num_hidden_layers=2),
        **dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.15),
        **dict(bos_token_id=1, eos_token_id=2),
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[: len(SPECIAL)] = 0
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    write_tokenizer(folder / "tokenizer.json")
    said = {"bos_token": "<s>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


def write_tokenizer(path: pathlib.Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(path))


def ids(text: str) -> list[int]:
    """Return the tokens of a text, without special tokens."""
    return [len(SPECIAL) + LETTERS.index(letter) for letter in text]


def text_of(tokens: list[int]) -> str:
    return "".join(LETTERS[token - len(SPECIAL)] for token in tokens)


class Oracle:
    """The reference implementation: transformers with the same folder, in float64."""

    def __init__(self, folder: pathlib.Path) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).double().eval()
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", chat_template=TEMPLATE
        )

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """Return the log probabilities of the next token at every position."""
        import torch

        with torch.no_grad():
            scores = self.model(torch.tensor([tokens])).logits[0].numpy()
        return scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)

    def greedy(self, prompt: list[int], steps: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(steps):
            tokens.append(int(self.logprobs(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


@functools.cache
def oracle(folder: pathlib.Path) -> Oracle:
    return Oracle(folder)
