"""One HTML file that shows finished or running runs: curves, time, distributions, samples."""
