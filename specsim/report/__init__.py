"""Reports for people: one self-contained HTML file per validation run.

Import `specsim.report.validation` where a report is written, not at start-up: it loads matplotlib.
"""
