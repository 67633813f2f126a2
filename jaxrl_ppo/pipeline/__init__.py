"""What one step computes and in which order: synchronous and one-step-off loops."""
