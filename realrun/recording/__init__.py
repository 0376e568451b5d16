"""Dense recording: every position at once."""
