"""What policies learn from a trace and its costs before they draft."""
