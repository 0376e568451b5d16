"""What runs in an engine's own process: a job in, a result out, both JSON; nothing of specsim is imported."""
