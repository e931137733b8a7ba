"""The outer sync: how replicas average what they learned every ``diloco.sync_every`` inner steps."""
