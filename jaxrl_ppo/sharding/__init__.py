"""Meshes and the rules from logical axes to mesh axes."""
