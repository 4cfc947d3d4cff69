"""The command `striped`. Every subcommand is one file here, and its options are one dataclass.

tyro derives flags and help texts from the dataclass. `bench` and `report` are in the package striped-attention-bench.
"""

import functools
import importlib.metadata
import importlib.util
import sys
from typing import Any

from striped_attention._version import __version__
from striped_attention.cli.guard import guard
from striped_attention.runtime.stop import stop_on_ctrl_c

_ABOUT = (
    f"striped_attention {__version__}: train and run language models on sequences longer than one device can hold. "
    "striped COMMAND --help lists the options of a command; --config FILE reads options from a TOML or JSON file, or "
    "from the run.json of a run; striped --version prints the versions."
)
# Subcommand → module, and the dataclass of its options in that module.
_COMMANDS = {
    "train": ("striped_attention.cli.train", "TrainConfig"),
    "tokenize": ("striped_attention.cli.tokenize", "TokenizeConfig"),
    "generate": ("striped_attention.cli.generate", "GenerateConfig"),
    "evaluate": ("striped_attention.cli.evaluate", "EvaluateConfig"),
    "import": ("striped_attention.cli.convert", "ImportConfig"),
    "export": ("striped_attention.cli.convert", "ExportConfig"),
    "bench": ("striped_bench.bench.command", "BenchConfig"),
    "plan": ("striped_attention.cli.plan", "PlanConfig"),
    "explore": ("striped_attention.cli.explore", "ExploreConfig"),
    "compile": ("striped_attention.cli.compile", "CompileConfig"),
    "report": ("striped_bench.report.command", "ReportConfig"),
}
_EXTRAS = {"bench": "bench", "report": "report", "compile": "tpu"}


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 for success, 2 for a request that cannot be fulfilled."""
    asked = sys.argv[1:] if arguments is None else arguments
    if asked == ["--version"]:
        print(_versions())
        return 0
    name = asked[0] if asked and asked[0] in _COMMANDS else None
    if arguments is None and name == "train":  # it has nothing to clean up before it handles signals itself
        stop_on_ctrl_c()
    try:
        import tyro

        commands, modules = _load()
        if name is not None and name not in commands:
            module, _ = _COMMANDS[name]
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        return _missing(error, name)
    cli = functools.partial(
        tyro.extras.subcommand_cli_from_dict,
        prog="striped",
        description=_ABOUT,
        config=(tyro.conf.FlagCreatePairsOff,),
    )

    def run() -> int:
        arguments = asked
        if name is not None:
            narrowed = getattr(modules[commands[name]], "narrowed", lambda _: None)(asked[1:])
            if narrowed is not None:  # the help of a part of the command
                flags = (tyro.conf.FlagCreatePairsOff,)
                tyro.cli(narrowed, prog=f"striped {name} {narrowed.__name__}", args=["--help"], config=flags)
            arguments = _complete(name, commands[name], modules, asked)
        config = cli(commands, args=arguments)
        try:
            return modules[type(config)].run(config) or 0
        except ModuleNotFoundError as error:
            return _missing(error, name)

    return guard(run)


def _complete(name: str, options: type[Any], modules: dict[type, Any], arguments: list[str]) -> list[str]:
    """Add the options from files: those of --config, and those that the command itself finds."""
    from striped_attention.cli.arguments import expand

    arguments = expand(name, options, arguments)
    complete = getattr(modules[options], "complete", None)
    return arguments if complete is None else complete(arguments)


def _versions() -> str:
    names = ("jax", "jaxlib", "numpy")
    return (
        f"striped_attention {__version__} ({', '.join(f'{name} {importlib.metadata.version(name)}' for name in names)})"
    )


def _load() -> tuple[dict[str, Any], dict[type, Any]]:
    """The options of every installed command, and the modules that run them."""
    from striped_attention.cli.help import join_lines

    commands, modules = {}, {}
    for name, (path, options) in _COMMANDS.items():
        if importlib.util.find_spec(path.split(".")[0]) is None:
            continue  # a separate package that is not installed
        module = importlib.import_module(path)
        commands[name] = getattr(module, options)
        join_lines(commands[name])
        modules[commands[name]] = module
    return commands, modules


def _missing(error: ModuleNotFoundError, command: str | None) -> int:
    """Print which package is missing and which extra installs it."""
    package = str(error.name).split(".")[0]
    if package == __package__.split(".")[0]:
        raise error  # a defect of this package: there is nothing to install
    extra = _EXTRAS.get(command or "", "train")
    clone = "-e . -e benchmarks" if command in ("bench", "report") else f"-e '.[{extra}]'"
    how = f"in a clone pip install {clone}, elsewhere pip install 'striped-attention[{extra}]'"
    print(f"striped: this command needs the package {package}: {how}", file=sys.stderr)
    return 2
