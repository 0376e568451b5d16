"""Tree policies, a file each."""
