"""Drafters' passes over static caches: those of `realrun.drafters`, recorded and replayed as the target's are."""
