"""Ray: resource pools, role to worker mapping, worker groups."""
