"""Whether the processes of a replica live and get anywhere, and why one failed."""
