"""What surrounds the trainers: the game, training, and what people look at."""
