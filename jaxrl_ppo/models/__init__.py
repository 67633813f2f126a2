"""The Flax decoder, its families, and Hugging Face folders read and written."""
