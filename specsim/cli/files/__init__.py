"""Commands on files: traces, results, examples, reports."""
