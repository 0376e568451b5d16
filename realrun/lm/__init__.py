"""One model and its cache."""
