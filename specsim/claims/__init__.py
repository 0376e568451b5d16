"""Claims about speculation, kept in TOML files and evaluated again: what was said, what is found, whether it holds."""
