"""Inference engines, really run on a pair: their rounds beside a replay's, and their seconds beside predicted ones."""
