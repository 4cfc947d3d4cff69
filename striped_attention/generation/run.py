"""Run: run batches of prompts through an engine, build answers token by token and measure speed.

The reasons why an answer ends, as `finish` in its line of JSON:

    end       one of the model's end tokens, detected by the engine
    stop      a stop string, found in the text on the host
    length    --max-tokens
"""

import contextlib
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress

from striped_attention.generation.engine import Engine
from striped_attention.generation.prompts import Prompt
from striped_attention.generation.sample import NO_TOKEN, Step
from striped_attention.generation.saved import Saved, save
from striped_attention.generation.settings import Settings
from striped_attention.generation.stops import StopStrings
from striped_attention.generation.text import Bytes, Tokenizer

# Fields of the lines of JSON, and those added by --logprobs.
RESULTS = ("number", "text", "tokens", "finish", "prompt_tokens", "new_tokens")
LOGPROBS = ("logprobs", "top_logprobs")


class Ends:
    """What ends an answer: the model's end tokens, stop strings, and special tokens that a stop string names."""

    def __init__(self, tokens: Sequence[int], strings: Sequence[str], encoder: Bytes | Tokenizer) -> None:
        self.tokens, self.strings = tokens, strings
        # Special tokens are never shown as text, so they are matched as tokens.
        self.named = [number for text in strings if (number := encoder.special(text)) is not None]

    @property
    def all_tokens(self) -> list[int]:
        return [*self.tokens, *self.named]


class Answer:
    """The text and tokens generated for one prompt. `finish` is the reason why it ended, None until then."""

    def __init__(self, stream: Any, ends: Ends) -> None:
        self._stream, self._ends, self._stops = stream, ends, StopStrings(ends.strings)
        self.tokens: list[int] = []
        self.text = ""
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[dict[str, Any]]] = []
        self.finish: str | None = None

    def add(self, step: Step, row: int) -> str:
        """Add this sequence's token of a step. Return the text that can be shown."""
        token = int(step.tokens[row])
        if self.finish is not None or token == NO_TOKEN:
            return ""
        self.tokens.append(token)
        if step.logprobs is not None:
            said = step.logprobs
            self.logprobs.append(float(said.chosen[row]))
            likeliest = zip(said.ids[row].tolist(), said.top[row].tolist(), strict=True)
            self.top_logprobs.append([{"token": number, "logprob": value} for number, value in likeliest])
        if token in self._ends.tokens:
            return self._end("end")
        if token in self._ends.named:
            return self._end("stop")
        return self._show(self._stream.add(token))

    def close(self) -> str:
        """End the answer, as no more tokens follow. Return the rest of the text."""
        return "" if self.finish is not None else self._end("length")

    def _end(self, how: str) -> str:
        self.finish = how
        piece = self._show(self._stream.finish())
        rest = self._stops.finish()
        self.text += rest
        return piece + rest

    def _show(self, piece: str) -> str:
        shown = self._stops.add(piece)
        self.text += shown
        if self._stops.found:
            self.finish = "stop"
        return shown


class Run:
    """Runs batch after batch through one engine.

    `alternatives` is the N of --logprobs, None for no log probabilities. With `saved`, prompts begin with its tokens.
    """

    def __init__(
        self,
        engine: Engine,
        encoder: Bytes | Tokenizer,
        ends: Ends,
        settings: Settings,
        console: rich.console.Console,
        alternatives: int | None = None,
        begun: float | None = None,
        saved: Saved | None = None,
    ) -> None:
        self.engine, self.encoder, self.ends, self.settings = engine, encoder, ends, settings
        self.console, self.alternatives, self.saved = console, alternatives, saved
        self.begun, self.first_token = time.perf_counter() if begun is None else begun, 0.0  # seconds
        self.loading = time.perf_counter() - self.begun
        self.prefilled = self.prefill_seconds = self.decoded = self.steps = self.decode_seconds = 0.0

    def batch(self, numbers: range, prompts: list[Prompt], tokens: list[list[int]], out: Any) -> None:
        """Answer some prompts. Write a line of JSON for each with `out`, or else print the text of the first."""
        done = self.begin()
        self.prefill([row[done:] for row in tokens])
        self.answer(numbers, prompts, tokens, out)

    def answer(self, numbers: range, prompts: list[Prompt], tokens: list[list[int]], out: Any) -> None:
        """Answer prompts that are already prefilled."""
        answers = self.decode(tokens, numbers, self.settings.max_tokens, show if out is None else None)
        if out is not None:
            for number, prompt, row, answer in zip(numbers, prompts, tokens, answers, strict=True):
                out(self._line(number + 1, prompt, len(row), answer))

    def keep(self, path: pathlib.Path, opening: list[int], prompt: list[int]) -> None:
        """Prefill one prompt, and save the cache of its `opening` tokens on the way."""
        done = self.begin()
        self.prefill([opening[done:]])
        with progress(self.console, "saving the cache", "layers") as say:
            save(self.engine, opening, path, say=say)
        self.console.print(f"{path}: the cache of {len(opening):,} tokens", soft_wrap=True)
        self.prefill([prompt[len(opening) :]])

    def begin(self) -> int:
        """Start new sequences. Return the number of tokens already cached, from a saved cache."""
        if self.saved is None:
            self.engine.clear()
            return 0
        with progress(self.console, "loading the cache", "layers") as say:
            self.saved.load(self.engine, say)
        return len(self.saved.tokens)

    def prefill(self, tokens: list[list[int]]) -> None:
        """Prefill tokens. Rows of the engine without a prompt get one token that is ignored."""
        missing = self.engine.options.batch - len(tokens)
        with self._clock() as clock, progress(self.console, "prefill", "tokens") as say:
            self.engine.prefill([*tokens, *[tokens[0][:1]] * missing], say)
        self.prefilled += sum(map(len, tokens))
        self.prefill_seconds += clock["seconds"]

    def decode(
        self, prompts: list[list[int]], numbers: Sequence[int], most: int, say: Callable[[str], None] | None
    ) -> list[Answer]:
        """Generate up to `most` tokens after the prefilled ones. `say` receives the first answer's text as it grows."""
        answers = [Answer(self.encoder.stream(prompt), self.ends) for prompt in prompts]
        batch = self.engine.options.batch
        rows, active = [*numbers, *[0] * (batch - len(answers))], np.arange(batch) < len(answers)
        say = say or (lambda piece: None)
        with self._clock() as clock:
            ends = self.ends.all_tokens
            for step in self.engine.decode(most, self.settings.sampling, ends, rows, active, self.alternatives):
                self.steps += 1
                self.first_token = self.first_token or time.perf_counter() - self.begun
                pieces = [answer.add(step, row) for row, answer in enumerate(answers)]
                say(pieces[0])
                for row, answer in enumerate(answers):
                    if answer.finish is not None:
                        self.engine.end(row)
        pieces = [answer.close() for answer in answers]
        say(pieces[0] + "\n")
        self.decoded += sum(len(answer.tokens) for answer in answers)
        self.decode_seconds += clock["seconds"]
        return answers

    def _line(self, number: int, prompt: Prompt, prompt_tokens: int, answer: Answer) -> dict[str, Any]:
        asked = {name: prompt.said[name] for name in ("prompt", "messages") if name in prompt.said}
        line: dict[str, Any] = {"number": number} | asked
        line |= {"text": answer.text, "tokens": answer.tokens, "finish": answer.finish}
        line |= {"prompt_tokens": prompt_tokens, "new_tokens": len(answer.tokens)}
        if self.alternatives is not None:
            line["logprobs"] = answer.logprobs
        if self.alternatives:
            line["top_logprobs"] = answer.top_logprobs
        return line | {name: value for name, value in prompt.said.items() if name not in line}

    @contextlib.contextmanager
    def _clock(self) -> Iterator[dict[str, float]]:
        """Measure seconds until the devices are done, without compiling."""
        clock: dict[str, float] = {}
        begun, compiled = time.perf_counter(), self.engine.compiling
        yield clock
        jax.block_until_ready(self.engine.scores)
        clock["seconds"] = time.perf_counter() - begun - (self.engine.compiling - compiled)

    def speed(self) -> str:
        """Report the speed in one line."""
        if not self.steps:
            return "nothing was generated"
        return (
            f"prefill {self.prefilled:,.0f} tokens, {self.prefilled / self.prefill_seconds:,.0f} tokens/s; decode "
            f"{self.decoded:,.0f} tokens, {self.decoded / self.decode_seconds:,.1f} tokens/s, "
            f"{1e3 * self.decode_seconds / self.steps:,.1f} ms per step; first token after {self.first_token:,.1f} s "
            f"(weights loaded after {self.loading:,.1f} s; compiling {self.engine.compiling:,.1f} s in total)"
        )


@contextlib.contextmanager
def progress(console: rich.console.Console, what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar; yields a function `say(done, total)` that moves it."""
    columns = (
        *(rich.progress.TextColumn(what), rich.progress.BarColumn(), rich.progress.TaskProgressColumn()),
        rich.progress.TextColumn("{task.completed:,.0f} of {task.total:,.0f} " + unit),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def show(piece: str) -> None:
    """Print text as it grows."""
    print(piece, end="", flush=True)
