"""The acceptance predictor of Cali-TS."""
