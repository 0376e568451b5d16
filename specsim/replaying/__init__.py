"""The compiled replay of a trace under a policy."""
