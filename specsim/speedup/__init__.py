"""From replays to speedups: formulas, intervals, oracles, predictions."""
