"""The parts of bench_train.py and bench_memory.py: models, implementations, clocks, rounds, reports."""
