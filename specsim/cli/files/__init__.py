"""What lies in files: traces, results, examples, reports."""
