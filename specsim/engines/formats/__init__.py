"""What engines and benchmarks write about speculation, read into traces, rounds or counters: a file per source."""
