"""The command `striped compile`."""

from striped_attention.compiling.config import CompileConfig


def run(config: CompileConfig) -> None:
    """Compile a training step for devices that are not here."""
    from striped_attention.compiling import command

    command.run(config)
