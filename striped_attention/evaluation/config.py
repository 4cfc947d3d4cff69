"""Config: every option of `striped evaluate`, once: its flags, help and defaults."""

import dataclasses
import pathlib
from typing import Annotated, Any, Literal

import tyro

from striped_attention.core.layout import DEFAULT, LayoutName
from striped_attention.errors import UsageError
from striped_attention.options import Numbers, Path, Paths, Text, Whole, check_at_least, check_shared
from striped_attention.strategies.strategy import AUTO

Folder = Annotated[pathlib.Path, tyro.conf.arg(metavar="PATH")]


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Measure whether a model uses its context.

    Perplexity by position: the loss of held-out tokens, by how much of their document they can see. Needle in a
    haystack: a sentence with a random number is hidden in long text, and a question at the end asks for it.
    """

    model: Folder
    """Folder of a run of `striped train`, of what `striped import` wrote, or of a Hugging Face model."""
    data: Paths = None
    """Held-out text, and the haystack: one or more sources in the forms that `striped train --data` takes. Default: the
    sources of Python's standard library."""
    text_column: Text = None
    """The column of JSON lines, Parquet and Arrow that holds the text. Default: text."""
    data_cache: Path = None
    """Folder for the tokens of --data, which are made once. Default: striped_attention/tokens in the user's cache
    folder, $XDG_CACHE_HOME or ~/.cache."""
    tokenizer: Path = None
    """A Hugging Face tokenizer.json. Default: the model's own; bytes if it was trained on bytes."""
    end_token: Whole = None
    """The token that ends a document in .npy and .bin data."""
    only: Annotated[Literal["perplexity", "needle"] | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Measure one of the two. Default: both."""
    output: Path = None
    """Where all numbers go as JSON, with the configuration, hardware and versions. `striped report` draws it. Default:
    nowhere."""

    sequence_length: Whole = None
    """Tokens of one sequence. Default: what the model was trained for."""
    sequences: int = 32
    """How many sequences of --data the perplexity is taken over, spread evenly over it; all if there are fewer."""

    lengths: Numbers = None
    """Lengths of the haystacks, question and answer included, in tokens. Default: an eighth, a quarter, half and all of
    --sequence-length."""
    depths: tuple[int, ...] = (0, 25, 50, 75, 100)
    """Where the needle is: percent of the haystack that come before it."""
    draws: int = 8
    """Haystacks per length and depth, each with another text, key and value."""
    needle: str = "\nThe secret number of {key} is {value}.\n"
    """The sentence to find."""
    question: str = "\nThe secret number of {key} is"
    """What follows the haystack."""
    answer: str = " {value}"
    """What the model must give, every token of it."""
    key_characters: str = "abcdefghijklmnopqrstuvwxyz"
    """Characters that random keys are made of."""
    key_length: int = 6
    """Characters of a key."""
    value_characters: str = "0123456789"
    """Characters that random values are made of."""
    value_length: int = 6
    """Characters of a value."""
    seed: int = 0
    """For texts, keys and values."""

    batch: int = 1
    """Sequences at a time, over all devices."""
    mesh: Text = None
    """Devices per axis, like data=2,sequence=4: sequences of a batch over data, tokens of a sequence over sequence.
    Default: every device on sequence."""
    layout: LayoutName = DEFAULT
    """How tokens are distributed over the devices of the sequence axis."""
    stripe: Whole = None
    """Tokens of a stripe. Default: about a tile, or less where a device has few tokens."""
    strategy: str = AUTO
    """How queries and keys of different devices meet: ring, heads, gather, or groups like heads=2,gather=4. auto: what
    is planned to be the fastest of those that fit in memory."""
    kernel: str = "auto"
    """Attention kernel; auto takes the fastest that can."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What the model computes in."""
    memory: float = 0.9
    """The part of each device's memory that the evaluation may use. --chunk follows from it."""
    chunk: Whole = None
    """Tokens that the feed-forward layers and the loss take at a time, on each device. Default: as many as fit into
    --memory."""

    cpu_devices: Whole = None
    """Run on this many virtual CPU devices (of each process)."""
    local_processes: Whole = None
    """Start this many processes on this machine, connected like a cluster; each gets cores of its own."""
    coordinator: Text = None
    """Address host:port of process 0, where JAX does not find the others by itself."""
    num_processes: Whole = None
    """How many processes there are in all."""
    process_id: Whole = None
    """Which of them this one is, from 0."""

    def __post_init__(self) -> None:
        check_shared(self)
        counts = ("sequence_length", "sequences", "draws", "key_length", "value_length", "batch", "chunk")
        check_at_least(self, dict.fromkeys(counts, 1))
        if not 0 < self.memory <= 1:
            raise UsageError(f"--memory must be above 0 and at most 1, a part of a device's memory; got {self.memory}.")
        if self.lengths is not None and (not self.lengths or min(self.lengths) < 1):
            raise UsageError(f"--lengths must be one or more numbers of tokens; got {_listed(self.lengths)}.")
        if not self.depths or not 0 <= min(self.depths) <= max(self.depths) <= 100:
            raise UsageError(f"--depths are percent, from 0 to 100; got {_listed(self.depths)}.")
        for name in ("needle", "question", "answer"):
            self.fill(name, "", "")
        for name in ("needle", "answer"):
            if "{value}" not in getattr(self, name):
                raise UsageError(f"--{name} must have {{value}} in it, what the model has to find.")
        for name in ("key_characters", "value_characters"):
            if not getattr(self, name):
                raise UsageError(f"--{name.replace('_', '-')} must be one character or more.")

    def fill(self, name: str, key: str, value: str) -> str:
        """The needle, question or answer with a key and a value in their places."""
        text = getattr(self, name)
        try:
            return text.format(key=key, value=value)
        except (LookupError, ValueError) as error:
            raise UsageError(
                f"--{name} may have the places {{key}} and {{value}}, and other braces doubled; got {text!r}."
            ) from error

    def record(self) -> dict[str, Any]:
        """All options as JSON can keep them."""
        return {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in dataclasses.asdict(self).items()}


def _listed(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers)) or "none"
