"""The command `striped generate`."""

from striped_attention.cli.guard import guard
from striped_attention.generation.config import GenerateConfig


def run(config: GenerateConfig) -> int:
    """Generate text; also what each of several local processes runs."""
    from striped_attention.generation import command
    from striped_attention.training import launch, memory

    def generate() -> int:
        asked = command.with_prompt(config)
        if config.local_processes is not None:
            return launch.start_local(asked, run)
        memory.reserve(config.memory)
        launch.connect(config)
        command.generate(asked)
        return 0

    return guard(generate, config.process_id)
