"""Sharded models on several processes of this machine, over gloo.

The cases of one world size share one set of processes, see :mod:`tests.distributed.world`.
``pytest -m distributed`` runs them, ``pytest -m "distributed and quick"`` a few that touch everything.
"""
