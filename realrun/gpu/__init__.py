"""`realrun gpu`: stages for a GPU that is there for minutes only."""
