"""The benchmarks: each times two ways of doing one thing, in turn, on the same tensors, in one run.

Absolute times belong to a machine; the ratio of two things timed side by side travels. Every result is checked bit for
bit as well, because a fast wrong copy is worth nothing.
"""
