"""What several tests share: small models, traces, plain references."""

from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the repository
