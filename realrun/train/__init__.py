"""Training of drafters and of the acceptance predictor; `registry.TRAININGS` lists all."""
