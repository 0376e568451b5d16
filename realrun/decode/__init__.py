"""The loop of real decoding: propose, verify, commit."""
