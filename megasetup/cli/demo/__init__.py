"""`megasetup demo`: the failure and its repair on a small real model, in under a minute.

model.py makes the Hugging Face model; shards.py holds its weights as a data-parallel rank would, on the CPU;
megatron.py holds them in real Megatron optimizers, on a GPU; story.py tells the rest, the same for both.
"""
