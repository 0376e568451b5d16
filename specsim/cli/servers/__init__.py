"""Commands about running servers."""
