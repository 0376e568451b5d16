"""Settings that every test here shares."""

from hypothesis import settings

# The first example of a policy compiles its kernel, so a deadline per example means nothing.
settings.register_profile("specsim", deadline=None, print_blob=True)
settings.load_profile("specsim")
