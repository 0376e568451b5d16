"""Inference engines: how they count rounds, what their numbers mean, and traces as they would run them."""
