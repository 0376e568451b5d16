"""Policies, of chains and of trees. A new one is a file like `adaedl.py` or `pct.py` and a line in `KINDS`."""
