"""The quorum service, and the actor that owns it."""
