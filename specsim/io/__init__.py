"""Files, JSON, Parquet, progress, random numbers: what every other part uses."""
