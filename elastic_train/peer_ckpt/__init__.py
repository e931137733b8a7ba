"""State that travels between replicas: what a rank holds, and the wire that carries it."""
