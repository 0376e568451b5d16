"""The one loop of real decoding: propose, verify, commit."""
