"""The decode engine: propose, verify, accept, observe."""
