"""Evaluation: acceptance, speed and identity to plain decoding, from real decoding in one engine."""
