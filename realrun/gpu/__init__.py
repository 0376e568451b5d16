"""What `realrun gpu` does in the minutes that a GPU is there."""
