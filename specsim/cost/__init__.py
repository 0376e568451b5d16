"""Cost models, from two constants to measured grids, and the table that they compile to."""
