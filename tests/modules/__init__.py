"""Tests of ``torchrec_kt.modules`` against slicing by key, and against TorchRec's own versions."""
