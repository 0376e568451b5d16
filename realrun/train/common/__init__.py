"""The common parts of trainings: text, loop, checkpoints, adapters."""
