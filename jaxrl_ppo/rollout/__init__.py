"""Generation: the vLLM and JAX engines behind one protocol, and the router over replicas."""
