"""Rules across requests, one per file: see `specsim.serving.draft_length`, which has schedules and TurboSpec."""
