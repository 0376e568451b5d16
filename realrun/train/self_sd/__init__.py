"""Self-SD's search for the sublayers to skip."""
