"""The command `striped train`."""

import pathlib

from striped_attention.cli.arguments import add_first, flags_of, given, read
from striped_attention.cli.guard import guard
from striped_attention.errors import UsageError
from striped_attention.training.config import TrainConfig

EXCLUSIVE = ({"mesh", "devices"}, {"layout", "stripe"})  # options of which one replaces the others


def complete(arguments: list[str]) -> list[str]:
    """Add the options of the run that --resume continues. Those on the command line override them."""
    asked = given(arguments)
    record = pathlib.Path(asked["checkpoint_dir"]) / "run.json" if asked.get("checkpoint_dir") else None
    if "resume" not in asked or record is None or not record.is_file():
        return arguments  # `folder.check` rejects a folder without a run
    try:
        found = read(record)
    except UsageError:
        return arguments  # `folder.read_record` reports the damage
    replaced = {name for options in EXCLUSIVE if options & asked.keys() for name in options}
    kept = {name: value for name, value in found.items() if name not in replaced}
    return add_first(arguments, flags_of(kept, str(record), "train", TrainConfig))


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
