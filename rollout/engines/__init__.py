"""Engines: what samples the rollouts. `base` is the seam; each engine has a module of its own."""
