"""Commands about inference engines."""
