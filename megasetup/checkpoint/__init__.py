"""Checkpoints on disk: where they are, whether they are whole, and the way from Hugging Face's format and back."""
