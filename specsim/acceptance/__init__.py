"""Acceptance models: from little data to dense traces. A new one is a file like `iid.py` and a line here."""
