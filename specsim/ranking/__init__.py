"""All policies tuned and ranked on one trace."""
