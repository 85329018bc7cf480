"""The parts of `scripts/bench.py`: options, contenders, worker processes, report."""
