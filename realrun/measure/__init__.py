"""What rounds cost on this machine."""
