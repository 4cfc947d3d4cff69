"""Config: all options of `striped evaluate`: flags, help and defaults."""

import dataclasses
import pathlib
from typing import Annotated, Any, Literal

import tyro

from striped_attention.core.layout import DEFAULT, LayoutName
from striped_attention.errors import UsageError
from striped_attention.options import LengthOrNone, Lengths, Path, Paths, Text, Whole, check_at_least, check_shared
from striped_attention.strategies.strategy import AUTO

Folder = Annotated[pathlib.Path, tyro.conf.arg(metavar="PATH")]


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Measure whether a model uses its context.

    Perplexity by position: the loss of held-out tokens, by how many tokens of their document they can see. Needle in a
    haystack: a sentence with a random value is hidden in a long text, and a question at the end asks for it.
    """

    model: Folder
    """Folder of a model: a run of `striped train`, the output of `striped import`, or a Hugging Face model."""
    data: Paths = None
    """Held-out text, also used for the haystacks: one or more sources in the formats of `striped train --data`.
    Default: the source code of Python's standard library."""
    text_column: Text = None
    """Column of JSON lines, Parquet and Arrow that holds the text. Default: text."""
    data_cache: Path = None
    """Folder that caches the tokens of --data, so that it is tokenised only once. Default: striped_attention/tokens in
    the user's cache folder, $XDG_CACHE_HOME or ~/.cache."""
    tokenizer: Path = None
    """A Hugging Face tokenizer.json. Default: the model's own, or one token per byte if it was trained on bytes."""
    end_token: Whole = None
    """Token that ends a document in .npy and .bin data. Without it, all of the data is one document."""
    only: Annotated[
        Literal["perplexity", "needle"] | None,
        tyro.conf.arg(metavar="{perplexity,needle}", help_behavior_hint=""),
    ] = None
    """Run only one of the two evaluations. Default: both."""
    output: Path = None
    """JSON file for all results, with the configuration, hardware and versions; plot it with `striped report`. Default:
    none."""

    sequence_length: LengthOrNone = None
    """Tokens per sequence. Default: the length that the model was trained for."""
    sequences: int = 32
    """Sequences for the perplexity, spread evenly over --data; all if there are fewer."""

    lengths: Lengths = None
    """Lengths of the haystacks in tokens, question and answer included, like 8k 32k. Default: an eighth, a quarter,
    half and all of --length."""
    depths: tuple[int, ...] = (0, 25, 50, 75, 100)
    """Depths of the needle: percent of the haystack's text that comes before it."""
    draws: int = 8
    """Haystacks per length and depth, each with a different text, key and value."""
    needle: str = "\nThe secret number of {key} is {value}.\n"
    """The sentence to find; {key} and {value} stand for a random key and value."""
    question: str = "\nThe secret number of {key} is"
    """The question after the haystack; {key} stands for the key."""
    answer: str = " {value}"
    """The answer that the model must give, with every token correct; {value} stands for the value."""
    key_characters: str = "abcdefghijklmnopqrstuvwxyz"
    """Characters used for random keys."""
    key_length: int = 6
    """Number of characters in a key."""
    value_characters: str = "0123456789"
    """Characters used for random values."""
    value_length: int = 6
    """Number of characters in a value."""
    seed: int = 0
    """Random seed for texts, keys and values."""

    batch: int = 1
    """Sequences per forward pass, over all devices."""
    devices: Whole = None
    """Devices that share each sequence, the same as --mesh sequence=N. Default: all devices, or those of --mesh."""
    mesh: Text = None
    """Devices per mesh axis, like data=2,sequence=4: the sequences of a batch are split over data, the tokens of a
    sequence over sequence. Default: all devices on sequence."""
    layout: LayoutName = DEFAULT
    """How tokens are distributed over the devices of the sequence axis."""
    stripe: Whole = None
    """Tokens per stripe. Default: about a tile, or less if a device has few tokens."""
    strategy: str = AUTO
    """Sequence parallelism: ring, heads, gather, or groups like heads=2,gather=4, as for `striped train`. auto takes
    the strategy that is planned to be the fastest of those that fit in memory."""
    kernel: str = "auto"
    """Attention kernel, as for `striped train`. auto takes the fastest usable."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the model's computation."""
    memory: float = 0.9
    """Fraction of each device's memory that the evaluation may use. It determines the default of --chunk."""
    chunk: Whole = None
    """Tokens per device that the feed-forward layers and the loss process at a time. Default: as many as fit into
    --memory."""

    cpu_devices: Whole = None
    """Run on this many virtual CPU devices per process."""
    local_processes: Whole = None
    """Start this many processes on this machine, connected like a cluster; each gets its own CPU cores."""
    coordinator: Text = None
    """Address host:port of process 0, for clusters that JAX does not detect by itself."""
    num_processes: Whole = None
    """Total number of processes."""
    process_id: Whole = None
    """Index of this process, from 0."""

    def __post_init__(self) -> None:
        check_shared(self)
        counts = ("sequence_length", "sequences", "draws", "key_length", "value_length", "batch", "chunk", "devices")
        check_at_least(self, dict.fromkeys(counts, 1))
        if not 0 < self.memory <= 1:
            raise UsageError(
                f"--memory must be above 0 and at most 1, a fraction of a device's memory; got {self.memory}."
            )
        if self.lengths is not None and (not self.lengths or min(self.lengths) < 1):
            raise UsageError(f"--lengths must be one or more numbers of tokens; got {_listed(self.lengths)}.")
        if not self.depths or not 0 <= min(self.depths) <= max(self.depths) <= 100:
            raise UsageError(f"--depths must be percentages from 0 to 100; got {_listed(self.depths)}.")
        for name in ("needle", "question", "answer"):
            self.fill(name, "", "")
        for name in ("needle", "answer"):
            if "{value}" not in getattr(self, name):
                raise UsageError(f"--{name} must contain {{value}}, which the model has to find.")
        for name in ("key_characters", "value_characters"):
            if not getattr(self, name):
                raise UsageError(f"--{name.replace('_', '-')} must have at least one character.")

    def fill(self, name: str, key: str, value: str) -> str:
        """Fill a key and a value into the template `name`: needle, question or answer."""
        text = getattr(self, name)
        try:
            return text.format(key=key, value=value)
        except (LookupError, ValueError) as error:
            raise UsageError(
                f"--{name} may use {{key}} and {{value}}; other braces must be doubled; got {text!r}."
            ) from error

    def record(self) -> dict[str, Any]:
        """All options as JSON-compatible values."""
        return {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in dataclasses.asdict(self).items()}


def _listed(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers)) or "none"
