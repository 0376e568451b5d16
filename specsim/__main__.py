"""`python -m specsim` is the command `specsim`."""

from specsim.cli.main import main

main()
