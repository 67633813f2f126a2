"""What a person sees of a run: metrics, trackers, timeline, samples, console."""
