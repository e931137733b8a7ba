"""Runs the replicas: the manager observes and acts, the policy decides."""
