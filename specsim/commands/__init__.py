"""The `specsim` commands that fill a file each, and the options they share."""
