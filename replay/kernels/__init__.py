"""The sparse path and the statistics pass in Triton. Nothing else in `replay` names triton."""
