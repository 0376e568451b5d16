"""What several tests share: small models, traces, plain references."""

from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the repository


def readme_block(holds: str, language: str = "python") -> str:
    """The README's one block of this language that holds these words."""
    blocks = (ROOT / "README.md").read_text().split(f"```{language}\n")[1:]
    (code,) = (block.split("```")[0] for block in blocks if holds in block)
    return code
