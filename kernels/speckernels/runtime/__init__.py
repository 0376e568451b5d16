"""Choice, build and launch of backends."""
