"""Changed targets: tuned with a drafter, with sublayers skipped, with blocks added."""
