"""Programs that run in an engine's own process, each by `run.py`: a job in, a result out, both JSON.

Nothing of this package is imported, so that an interpreter of another environment can run these files.
"""
