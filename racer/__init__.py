"""What surrounds the trainers: the game, training, and what people look at.

from racer import load_driver

driver = load_driver("runs/NAME")       # or a checkpoint, of either algorithm
actions = driver(observations)          # of one car (14,) or of many (N, 14)
"""


def __getattr__(name: str):
    if name == "load_driver":  # on demand: the game alone needs no torch
        from racer.training.checkpoints import load_driver

        return load_driver
    raise AttributeError(f"module 'racer' has no attribute {name!r}")
