"""`python -m realrun` is the command `realrun`."""

from realrun.cli import main

main()
