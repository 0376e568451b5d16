"""Acceptance models, which turn little data into dense traces; `files.MODELS` lists them."""
