"""Everything that needs a GPU, gathered in one command of short independent stages.

A stage is one file of this package: `run(job)`, which returns the document of its result.
Each ends inside its minutes and can be run again to go on. Without a GPU the same stages run
at reduced sizes.
"""
