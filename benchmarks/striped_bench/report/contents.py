"""Contents: the figures of a report. Their order and the commands that produce their results are in words.toml."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from striped_bench.report import accuracy, balance, compiled, context, cost, speed, training
from striped_bench.report.read import Document
from striped_bench.report.section import WORDS, Finding, NoData, Section, make_section

_MAKERS: dict[str, Callable[[Sequence[Document]], Finding]] = {
    **{"speedup-gpu": speed.gpus, "speedup-cpu": speed.cpus, "kernels": cost.kernels, "steps": cost.steps},
    **{"trainers": training.trainers, "overhead": cost.overhead, "rates": cost.rates, "tiles": speed.tiles},
    **{f"masks{end}": functools.partial(speed.masks, platform=on) for end, on in (("", "cpu"), ("_gpu", "gpu"))},
    **{"decode": cost.traffic, "memory": cost.memory, "accuracy": accuracy.accuracy, "peers": cost.peers},
    **{"compiled-memory": compiled.memory, "compiled-overlap": compiled.overlap},
    **{"validation": context.validation, "positions": context.positions, "needles": context.needles},
}
# These also draw plans, if asked to.
_PLANNERS: dict[str, Callable[[Sequence[Document], bool], Finding]] = {
    **{"work": balance.work, "timeline": balance.timeline, "scaling": speed.scaling, "throughput": cost.throughput},
}


class Contents(NamedTuple):
    """A report before it is drawn; `missing` lists figures without data and the commands that produce it."""

    sections: tuple[Section, ...]
    missing: tuple[tuple[str, str], ...]
    documents: tuple[Document, ...]
    plans: bool

    @property
    def summary(self) -> list[Section]:
        """The sections whose numbers are at the top of the page."""
        return [section for section in self.sections if section.number][:3]


def gather(documents: Sequence[Document], plans: bool = False) -> Contents:
    """Make every section for which these documents have data; with `plans` also what is planned, not measured."""
    sections, missing = [], []
    for name, words in ((name, words) for name, words in WORDS.items() if name != "shared"):
        try:
            found = _PLANNERS[name](documents, plans) if name in _PLANNERS else _MAKERS[name](documents)
            sections.append(make_section(name, found))
        except NoData:
            missing.append((words["what"], words["command"]))
    return Contents(tuple(sections), tuple(missing), tuple(documents), plans)
