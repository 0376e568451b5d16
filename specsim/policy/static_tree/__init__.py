"""Static trees: shapes, acceptance rates, searches."""
