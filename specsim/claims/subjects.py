"""What a claim's subject comes out as: a replay, batches, a real run, or a JSON document evaluated again."""

from __future__ import annotations

from pathlib import Path

from specsim.claims.claim import ReplaySubject, RunSubject, ServingSubject, Subject
from specsim.claims.measured import Measured, in_document
from specsim.claims.replayed import of_replay
from specsim.claims.runs import of_run
from specsim.claims.serving import of_serving


def measure(subject: Subject, home: Path) -> Measured:
    """Evaluate a subject; paths in it are relative to `home`. InputError where that cannot be."""
    if isinstance(subject, ReplaySubject):
        return of_replay(subject, home)
    if isinstance(subject, ServingSubject):
        return of_serving(subject, home)
    if isinstance(subject, RunSubject):
        return of_run(subject, home)
    return in_document(subject, home / subject.document)
