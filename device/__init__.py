"""The device layer: which accelerator is here and what it can do."""
