"""The Inductor executor: fused kernels in the plan's order, checked against the plan before they run."""
