"""`python -m realrun` is the command `realrun`."""

from realrun.cli.main import main

main()
