"""The command `striped`. Every subcommand is one file here, and its options are one dataclass.

tyro makes flags and help texts of the dataclass. `bench` and `report` come with the package striped-attention-bench.
"""

import functools
import importlib.util
import sys
from typing import Any

from striped_attention.cli.guard import guard

# Subcommand → module, and the dataclass of its options in there.
_COMMANDS = {
    "train": ("striped_attention.cli.train", "TrainConfig"),
    "tokenize": ("striped_attention.cli.tokenize", "TokenizeConfig"),
    "generate": ("striped_attention.cli.generate", "GenerateConfig"),
    "evaluate": ("striped_attention.cli.evaluate", "EvaluateConfig"),
    "import": ("striped_attention.cli.convert", "ImportConfig"),
    "export": ("striped_attention.cli.convert", "ExportConfig"),
    "bench": ("striped_bench.bench.command", "BenchConfig"),
    "plan": ("striped_attention.cli.plan", "PlanConfig"),
    "compile": ("striped_attention.cli.compile", "CompileConfig"),
    "report": ("striped_bench.report.command", "ReportConfig"),
}
_EXTRAS = {"bench": "bench", "report": "report", "compile": "tpu"}


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit code is 0 when all went well, 2 when something asked for cannot be done."""
    asked = sys.argv[1:] if arguments is None else arguments
    name = asked[0] if asked and asked[0] in _COMMANDS else None
    try:
        import tyro

        commands, modules = _load()
        if name is not None and name not in commands:
            module, _ = _COMMANDS[name]
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        return _missing(error, name)
    cli = functools.partial(
        tyro.extras.subcommand_cli_from_dict, prog="striped", config=(tyro.conf.FlagCreatePairsOff,)
    )

    def run() -> int:
        config = cli(commands, args=arguments)
        try:
            return modules[type(config)].run(config) or 0
        except ModuleNotFoundError as error:
            return _missing(error, name)

    return guard(run)


def _load() -> tuple[dict[str, Any], dict[type, Any]]:
    """The options of every command that is installed, and the module that runs them."""
    commands, modules = {}, {}
    for name, (path, options) in _COMMANDS.items():
        if importlib.util.find_spec(path.split(".")[0]) is None:
            continue  # a package of its own, which is not installed
        module = importlib.import_module(path)
        commands[name] = getattr(module, options)
        modules[commands[name]] = module
    return commands, modules


def _missing(error: ModuleNotFoundError, command: str | None) -> int:
    """Say which package is missing, and the extra of this one that brings it."""
    package = str(error.name).split(".")[0]
    if package == __package__.split(".")[0]:
        raise error  # a mistake of ours, and nothing to install
    how = f"pip install 'striped-attention[{_EXTRAS.get(command or '', 'train')}]'"
    if command in ("bench", "report"):
        how = f"in a clone pip install -e . -e benchmarks, elsewhere {how}"
    print(f"striped: the command needs the package {package}: {how}", file=sys.stderr)
    return 2
