"""The command `striped train`."""

from striped_attention.cli.guard import guard
from striped_attention.training.config import TrainConfig


def run(config: TrainConfig) -> int:
    """Train; also what each of several local processes runs."""
    from striped_attention.training import dry_run, launch, memory, settle, start, trainer, validation

    def train() -> int:
        if config.dry_run:
            begin = start.look(config)
            sizes = trainer.mesh_sizes(config, config.cpu_devices)
            begin.config.check(config.data)
            validation.check(begin.config)
            dry_run.show(settle.settle(begin.config, sizes, documents=True), sizes, begin.lines)
            return 0
        if config.local_processes is not None:
            return launch.start_local(config, run)
        memory.reserve(config.memory)
        launch.connect(config)
        trainer.train(config)
        return 0

    return guard(train, config.process_id)
