"""Training of the drafters that live inside a target."""
