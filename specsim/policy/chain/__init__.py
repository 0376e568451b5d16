"""Chain policies, a file each."""
