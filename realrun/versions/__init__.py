"""`realrun compare`: two versions of the code decode the same prompts in turns, in processes of their own."""
