"""The command `striped`. Every subcommand's options are one dataclass, from which tyro makes flags and help."""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import jax


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit code is 0 when all went well, 2 when something asked for cannot be done."""
    try:
        import tyro

        from striped_attention import plan_command
        from striped_attention.bench.config import BenchConfig
        from striped_attention.compiling.config import CompileConfig
        from striped_attention.generation.config import ExportConfig, GenerateConfig, ImportConfig
        from striped_attention.report.config import ReportConfig
        from striped_attention.training.config import TrainConfig
    except ModuleNotFoundError as error:
        asked = sys.argv[1:] if arguments is None else arguments
        return _missing(error, "report" if asked[:1] == ["report"] else "train")
    commands = {
        "train": TrainConfig,
        "generate": GenerateConfig,
        "import": ImportConfig,
        "export": ExportConfig,
        "bench": BenchConfig,
        "plan": plan_command.PlanConfig,
        "compile": CompileConfig,
        "report": ReportConfig,
    }
    cli = functools.partial(
        tyro.extras.subcommand_cli_from_dict, prog="striped", config=(tyro.conf.FlagCreatePairsOff,)
    )

    def run() -> int:
        config = cli(commands, args=arguments)
        if isinstance(config, plan_command.PlanConfig):
            plan_command.run(config)
            return 0
        if isinstance(config, ReportConfig):
            return report(config)
        if isinstance(config, CompileConfig):
            return compile_step(config)
        if isinstance(config, GenerateConfig):
            return generate(config)
        if isinstance(config, (ImportConfig, ExportConfig)):
            return convert(config)
        return train(config) if isinstance(config, TrainConfig) else bench(config)

    return _guard(run)


def train(config: Any) -> int:
    """`striped train`; also what each of several local processes runs."""
    try:
        from striped_attention.training import data, dry_run, launch, trainer
    except ModuleNotFoundError as error:
        return _missing(error)

    def run() -> int:
        if config.dry_run:
            sizes = trainer.mesh_sizes(config, config.cpu_devices)
            data.check(config.data, config.tokenizer, config.model.vocabulary)
            dry_run.show(config, sizes)
            return 0
        if config.local_processes is not None:
            return launch.start_local(config, train)
        launch.connect(config)
        trainer.train(config)
        return 0

    return _guard(run, "striped" if config.process_id is None else f"striped, process {config.process_id}")


def generate(config: Any) -> int:
    """`striped generate`; also what each of several local processes runs."""
    try:
        from striped_attention.generation import command
        from striped_attention.training import launch
    except ModuleNotFoundError as error:
        return _missing(error)

    def run() -> int:
        asked = command.with_prompt(config)
        if config.local_processes is not None:
            return launch.start_local(asked, generate)
        launch.connect(config)
        command.generate(asked)
        return 0

    return _guard(run, "striped" if config.process_id is None else f"striped, process {config.process_id}")


def convert(config: Any) -> int:
    """`striped import` and `striped export`."""
    try:
        from striped_attention.generation import command
        from striped_attention.generation.config import ImportConfig
    except ModuleNotFoundError as error:
        return _missing(error)
    if isinstance(config, ImportConfig):
        command.import_model(config)
    else:
        command.export_model(config)
    return 0


def compile_step(config: Any) -> int:
    """`striped compile`."""
    try:
        from striped_attention.compiling.command import run
    except ModuleNotFoundError as error:
        return _missing(error)
    run(config)
    return 0


def bench(config: Any) -> int:
    """`striped bench`. Every suite is a module with the function `run`; `overlap` is another view of `gpu`."""
    try:
        module = importlib.import_module(f"striped_attention.bench.{config.suite.replace('overlap', 'gpu')}")
    except ModuleNotFoundError as error:
        return _missing(error)
    run = module.overlap if config.suite == "overlap" else module.run
    run(config)
    return 0


def report(config: Any) -> int:
    """`striped report`."""
    try:
        from striped_attention.report.command import run
    except ModuleNotFoundError as error:
        return _missing(error, "report")
    run(config)
    return 0


def _guard(run: Callable[[], int], name: str = "striped") -> int:
    """Run, and turn what a user can mend into one line, which `name` begins, and an exit code."""
    from striped_attention.training.errors import Diverged, UsageError

    try:
        return run()
    except (UsageError, Diverged) as error:
        message, code = str(error), 2 if isinstance(error, UsageError) else 1
    except Exception as error:
        if not (jax.distributed.is_initialized() and _lost_contact(error)):
            raise
        message, code = f"another process is gone: {str(error).splitlines()[0]}", 1
    print(f"{name}: {message}", file=sys.stderr, flush=True)
    if jax.distributed.is_initialized():
        os._exit(code)  # JAX's own way out waits minutes for the other processes, who may be waiting for this one
    return code


def _lost_contact(error: Exception) -> bool:
    """Whether an error says that a collective operation had nobody to work with."""
    return any(word in str(error) for word in ("Gloo", "NCCL", "heartbeat", "Connection closed by peer"))


def _missing(error: ModuleNotFoundError, extra: str = "train") -> int:
    """Say which package is missing, and the extra of this one that brings it."""
    package = str(error.name).split(".")[0]
    print(
        f"striped: the command needs the package {package}: pip install 'striped-attention[{extra}]'", file=sys.stderr
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
