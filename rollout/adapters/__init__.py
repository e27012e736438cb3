"""Dumps of other origin as rollouts; one module per layout."""
