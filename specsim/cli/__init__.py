"""The `specsim` command line, a thin skin over the package."""
