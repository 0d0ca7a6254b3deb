"""The model hub: searches, and downloads that can resume and that publish a folder only once it is complete."""
