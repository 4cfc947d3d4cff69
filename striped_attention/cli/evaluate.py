"""The command `striped evaluate`."""

from striped_attention.cli.guard import guard
from striped_attention.evaluation.config import EvaluateConfig


def run(config: EvaluateConfig) -> int:
    """Evaluate a model; also what each of several local processes runs."""
    from striped_attention.evaluation import command
    from striped_attention.training import launch, memory

    def evaluate() -> int:
        if config.local_processes is not None:
            return launch.start_local(config, run)
        memory.reserve(config.memory)
        launch.connect(config)
        command.evaluate(config)
        return 0

    return guard(evaluate, config.process_id)
