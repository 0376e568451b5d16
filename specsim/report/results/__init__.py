"""Pages of results that commands print as JSON, and the page that joins results of any kind."""
