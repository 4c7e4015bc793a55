"""`megasetup demo`: from a Hugging Face model to training on a small scale, with the failure and its repair.

model.py makes the models and policy.py their configs; imported.py converts them, and checks and plans the configs.
With a GPU training.py sets up and trains, without and with the refresh; without one shards.py holds the imported
weights as a data-parallel rank would. story.py tells what the copies hold, the same for both.
"""
