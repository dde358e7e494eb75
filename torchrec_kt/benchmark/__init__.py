"""Measurements. ``python -m torchrec_kt.benchmark.calibrate`` fits the cost rule of the CPU path."""
