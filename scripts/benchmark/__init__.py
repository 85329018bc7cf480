"""The parts of `scripts/bench.py`: what it asks, the workers that it starts, and what is made of their answers."""
