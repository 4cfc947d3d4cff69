"""A team of workers in this process, which saves starting JAX and compiling again."""

import contextlib


class Here(contextlib.ExitStack):
    """Like `striped_bench.bench.workers.Team`, with one rank in this process."""

    alive = True

    def __init__(self, kind, cores, **options):
        super().__init__()
        self.subject = kind(rank=0, ranks=1, port=0, **options)

    def ask(self, method, *arguments):
        return [getattr(self.subject, method)(*arguments)]
