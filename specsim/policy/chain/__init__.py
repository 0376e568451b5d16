"""Chain policies, one file each."""
