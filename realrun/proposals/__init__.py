"""What a drafter proposes at every position of an output at once: the passes behind a recorded trace."""
