"""Coordination of the processes of a run: rendezvous, agreement, preemption, hangs."""
