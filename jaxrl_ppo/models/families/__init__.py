"""One table per model family: Hugging Face configuration, tensor names and layouts."""
