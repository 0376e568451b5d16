"""Record traces and measure the costs of rounds on this machine."""
