"""The Hydra configuration tree; a package so that it travels inside a wheel."""
