"""The command `striped tokenize`."""

from striped_attention.data.command import TokenizeConfig, tokenize


def run(config: TokenizeConfig) -> None:
    """Tokenise."""
    tokenize(config)
