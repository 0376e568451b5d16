"""Small pairs, one file per family of drafters."""
