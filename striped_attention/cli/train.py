"""The command `striped train`."""

from striped_attention.cli.guard import guard
from striped_attention.training.config import TrainConfig


def run(config: TrainConfig) -> int:
    """Train; also what each of several local processes runs."""
    from striped_attention.training import dry_run, launch, memory, settle, start, trainer, validation
    from striped_attention.training import weights_and_biases as wandb

    def train() -> int:
        if config.dry_run:
            wandb.check(config)
            begin = start.look(config)
            sizes, documents = trainer.mesh_sizes(config, config.cpu_devices), config.documents
            begin.config.check(config.data)
            validation.check(begin.config)
            planned, reasons = settle.settled(begin.config, sizes, documents)
            trainer.choose(planned, sizes, documents, platform=None)  # refuses what the run would
            dry_run.show(planned, sizes, [*reasons, *begin.lines])
            return 0
        if config.local_processes is not None:
            wandb.check(config)
            return launch.start_local(config, run)
        memory.reserve(config.memory)
        launch.connect(config)
        trainer.train(config)
        return 0

    return guard(train, config.process_id)
