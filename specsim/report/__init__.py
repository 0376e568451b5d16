"""Reports for people: a self-contained HTML file per result.

Import `specsim.report.validation` where a report is written, not at start-up: it loads matplotlib.
"""
