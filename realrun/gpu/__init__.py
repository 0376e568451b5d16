"""`realrun gpu`: a lent GPU used whole, in stages."""
