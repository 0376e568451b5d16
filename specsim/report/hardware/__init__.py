"""The report of a comparison of hardware."""
