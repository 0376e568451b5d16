"""Dense traces: what the drafter would propose at every position of the target's output."""
