"""Claims about speculation: regression checks that TOML files state and commands evaluate again."""
