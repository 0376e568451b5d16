"""`python -m speckernels` is the command `speckernels`."""

from speckernels.cli import main

main()
