"""The `realrun` command line, a thin skin over the package."""
