"""Where a replica's data comes from, and where it stands in it."""
