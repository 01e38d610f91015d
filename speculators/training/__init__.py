"""Training a speculator from nothing but its verifier."""
