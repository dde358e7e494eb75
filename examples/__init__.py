"""Runnable examples for torchrec_kt."""
