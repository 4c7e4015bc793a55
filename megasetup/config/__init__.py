"""From one config, a plain mapping as YAML gives it, to a checked Megatron-Bridge container: one file per concern.

Import from the file that names the concern; nothing heavy is imported with this package.
"""
