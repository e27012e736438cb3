"""Rollouts as trainers read them, and dumps of other tools as rollouts; one module per layout."""
