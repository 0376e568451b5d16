"""Drafters that look up earlier text: n-grams and suffixes."""
