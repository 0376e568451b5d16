"""Chain, tree and switch policies. To add a policy, write a file like `adaedl.py` and a line in `KINDS`."""
