"""Targets with their drafters and tokenizers, from disk or by shape; prompts."""
