"""The `rollout` command: decorators and one library call each. Heavy imports wait in the bodies."""
