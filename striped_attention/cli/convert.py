"""The commands `striped import` and `striped export`."""

from striped_attention.generation.config import ExportConfig, ImportConfig


def run(config: ImportConfig | ExportConfig) -> None:
    """Convert a model from or to Hugging Face's format."""
    from striped_attention.generation import command

    if isinstance(config, ImportConfig):
        command.import_model(config)
    else:
        command.export_model(config)
