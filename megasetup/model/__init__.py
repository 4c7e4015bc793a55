"""From a checked config to a model, an optimizer and a tokenizer that are ready to train.

Import from the file that names the concern; nothing heavy is imported with this package.
"""
