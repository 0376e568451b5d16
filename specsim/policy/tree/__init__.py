"""Tree policies, one file each."""
