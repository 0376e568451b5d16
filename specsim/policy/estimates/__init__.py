"""What learned policies evaluate while drafting."""
