"""Small pairs, a file per family of drafters."""
