"""All drafters of a target ranked at costs measured side by side."""
